"""Names, texts that cross the wire (errors of a client, words of a stranger), sizes."""

import re
from collections.abc import Iterable
from pathlib import Path
from unicodedata import normalize

LONGEST = 500
LONGEST_IN_LOG = 10_000
LONGEST_NAME = 200
_FOLDERS = re.compile(r"…?(?<![\w.:/])/(?:[^\s/:;,'\"()]+/)+")


def with_composed_letters(name: str) -> str:
    """``name`` with one character for an umlaut: macOS writes two, which look the same."""
    return normalize("NFC", name)


def in_order(names: Iterable[str]) -> list[str]:
    """The names in natural order, which is always the same one.

    ``site-2`` comes before ``site-10``, and ``site-01`` before ``site-1``.
    """

    def natural(name: str) -> tuple[str, str]:
        padded = re.sub(r"\d+", lambda number: number.group().zfill(12), name)
        return padded, name

    return sorted(names, key=natural)


def first_of(names: Iterable[str], most: int = 20) -> str:
    """The first of the names with commas, and how many there are where these are more."""
    listed = list(names)
    more = f", … ({len(listed)})" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def printable(text: str, longest: int = LONGEST) -> str:
    """At most ``longest`` characters in one line, safe in a log and on a terminal.

    A control character is written as its number.
    """
    line = "; ".join(text[:longest].splitlines())
    letters = [letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in line]
    if len(text) > longest:
        letters.append(f" … ({len(text)} characters)")
    return "".join(letters)


def numbered(name: str, names: Iterable[str]) -> list[str]:
    """List those of ``names`` that are ``name`` and the number of a Flower run.

    So the folders of runs at a site are called.
    """
    with_number = re.compile(re.escape(name) + r"-\d+")
    return [entry for entry in names if with_number.fullmatch(entry)]


def is_plain_name(text: str) -> bool:
    """Return whether ``text`` may name a folder and stand in a log.

    It then is short and printable, without slashes, and not hidden.
    """
    if not text or not is_short_and_printable(text):
        return False
    return not text.startswith(".") and "/" not in text and "\\" not in text


def is_short_and_printable(text: str) -> bool:
    return len(text) <= LONGEST_NAME and text.isprintable()


def is_site_name(text: str) -> bool:
    """Return whether ``text`` may name a site: ASCII letters, digits, ``.``, ``_`` and ``-``.

    So no two names look alike.
    """
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None


def as_file_name(text: str) -> str:
    """``text`` with what is not fit for the name of a file replaced by ``-``."""
    return re.sub(r"[^\w.-]+", "-", text)


def without_paths(text: str) -> str:
    """``text`` without the folders of absolute paths: where things lie is a site's own business.

    ``/home/jane/scans/a.png`` becomes ``…/a.png``. A folder with a space in its name is recognised
    only inside the home folder and the working directory.
    """
    for folder in (str(Path.cwd()), str(Path.home())):
        if len(folder) > 1:
            text = re.sub(re.escape(folder) + r"(?![\w.-])", "…", text)
    return _FOLDERS.sub("…/", text)


def human_bytes(size: float) -> str:
    """1536 -> ``1.5 kB`` (steps of 1000)."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} GB"


def human_seconds(seconds: float) -> str:
    """75 -> ``1m15s``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s"
