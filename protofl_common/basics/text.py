"""Names, texts that cross the wire (errors of a client, words of a stranger), sizes."""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from unicodedata import name as character_name
from unicodedata import normalize

LONGEST = 500
LONGEST_IN_LOG = 10_000
LONGEST_NAME = 200
# the folders at the beginning of an absolute path, but not the path of a URL
_FOLDERS = re.compile(r"…?(?<![\w.:/])/(?:[^\s/:;,'\"()]+/)+")


def with_composed_letters(name: str) -> str:
    """Return ``name`` with one character for an umlaut: macOS writes two, which look the same."""
    return normalize("NFC", name)


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names in natural order: ``site-2`` before ``site-10``.

    Names that differ in leading zeros only have an order too: ``site-01`` before ``site-1``.
    """
    return sorted(names, key=_natural_key)


@lru_cache(maxsize=10_000)  # each round puts all sites in order, several times
def _natural_key(name: str) -> tuple[str, str]:
    # with leading zeros, numbers of up to twelve digits sort as texts
    padded = re.sub(r"\d+", lambda number: number.group().zfill(12), name)
    return padded, name


def first_of(names: Iterable[str], most: int = 20) -> str:
    """Return up to ``most`` names with commas; if there are more, also how many there are."""
    names = list(names)
    total = f", … ({len(names)})" if len(names) > most else ""
    return ", ".join(names[:most]) + total


def printable(text: str, longest: int = LONGEST) -> str:
    """Return ``text`` in one line, safe in a log and on a terminal, cut to ``longest`` characters.

    ``; `` replaces a line break, and an escape such as ``\\x1b`` a control character. A text that
    is cut ends with its full length.
    """
    line = "; ".join(text[:longest].splitlines())
    letters = [letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in line]
    if len(text) > longest:
        letters.append(f" … ({len(text)} characters)")
    return "".join(letters)


def with_run_id(run_name: str, folders: Iterable[str]) -> list[str]:
    """Return those of ``folders`` that a site has made for runs called ``run_name``.

    Such a folder's name is that of the run and the id of a Flower run: ``trial-4711``.
    """
    pattern = re.compile(re.escape(run_name) + r"-\d+")
    return [folder for folder in folders if pattern.fullmatch(folder)]


def is_plain_name(text: str) -> bool:
    """Return whether ``text`` may name a folder and stand in a log.

    It must be short and printable, without slashes, and not begin with a dot.
    """
    if not text or not is_short_and_printable(text):
        return False
    return not text.startswith(".") and "/" not in text and "\\" not in text


def is_short_and_printable(text: str) -> bool:
    return not problem_of_name(text)


def problem_of_name(text: str) -> str:
    """Return why a text of data or settings cannot be a name; "" if it can."""
    if len(text) <= LONGEST_NAME and text.isprintable():
        return ""
    if len(text) > LONGEST_NAME or len(text.splitlines()) > 1:
        wanted = f"a name has no line break, and at most {LONGEST_NAME} characters"
        return f'{wanted}; is a quote (") without its pair?'
    hidden = next(letter for letter in text if not letter.isprintable())
    called = f"U+{ord(hidden):04X} {character_name(hidden, '')}".rstrip()
    return f"a name has no invisible character, such as {called} here; write it without"


def is_site_name(text: str) -> bool:
    """Return whether ``text`` may name a site: ASCII letters, digits, ``.``, ``_`` and ``-``.

    Letters of other alphabets are refused, as some of them look like these.
    """
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None


def as_file_name(text: str) -> str:
    """Return ``text`` with ``-`` for what does not fit in the name of a file."""
    return re.sub(r"[^\w.-]+", "-", text)


def without_paths(text: str) -> str:
    """Return ``text`` without the folders of absolute paths: where a site keeps files is private.

    ``/home/jane/scans/a.png`` becomes ``…/a.png``. A folder with a space in its name is recognised
    only as a part of the home folder or the working directory.
    """
    for folder in (str(Path.cwd()), str(Path.home())):
        if len(folder) > 1:  # not "/", which every path begins with
            # the whole folder's name, not the beginning of a longer one
            text = re.sub(re.escape(folder) + r"(?![\w.-])", "…", text)
    return _FOLDERS.sub("…/", text)


def human_bytes(size: float) -> str:
    """Return a number of bytes for people: 1536 -> ``1.5 kB`` (steps of 1000)."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} GB"


def human_seconds(seconds: float) -> str:
    """Return a duration for people: 7.25 -> ``7.2s``, 75 -> ``1m15s``, 3660 -> ``1h01m``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s"
