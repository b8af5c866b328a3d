"""Names in the order that people expect, texts that cross the wire (errors of a client, words of a stranger), sizes."""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from unicodedata import normalize

LONGEST, LONGEST_IN_LOG = 500, 10_000
LONGEST_NAME = 200
composed = partial(normalize, "NFC")  # a name with one character for an umlaut: macOS writes two, which look the same
_FOLDERS = re.compile(r"…?(?<![\w.:/])/(?:[^\s/:;,'\"()]+/)+")


def in_order(names: Iterable[str]) -> list[str]:
    """Natural order: ``site-2`` before ``site-10``, and always the same one: ``site-01`` before ``site-1``."""
    return sorted(names, key=lambda name: (re.sub(r"\d+", lambda number: number.group().zfill(12), name), name))


def names_in(text: object) -> tuple[str, ...]:
    """The distinct names of a comma-separated list; () for none."""
    return tuple(dict.fromkeys(name.strip() for name in str(text or "").split(",") if name.strip()))


def printable(text: str, longest: int = LONGEST) -> str:
    """At most ``longest`` characters in one line, without control characters: safe in a log and on a terminal."""
    line = "; ".join(text[:longest].splitlines())
    plain = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in line)
    return plain + (f" … ({len(text)} characters)" if len(text) > longest else "")


def numbered(name: str, names: Iterable[str]) -> list[str]:
    """List those of ``names`` that are ``name`` and the number of a Flower run, as folders of runs at a site."""
    return [entry for entry in names if re.fullmatch(re.escape(name) + r"-\d+", entry)]


def is_plain_name(text: str) -> bool:
    """Return whether ``text`` may name a folder and stand in a log: short, printable, without slashes, not hidden."""
    short = 0 < len(text) <= LONGEST_NAME
    return short and text.isprintable() and not text.startswith(".") and not set(text) & {"/", "\\"}


def is_site_name(text: str) -> bool:
    """Return whether ``text`` may name a site: ASCII letters, digits, ``.``, ``_``, ``-``; no two look alike."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None


def as_file_name(text: str) -> str:
    """``text`` with what is not fit for the name of a file replaced by ``-``."""
    return re.sub(r"[^\w.-]+", "-", text)


def without_paths(text: str) -> str:
    """``text`` with the folders of absolute paths left out: where things lie is a site's own business.

    ``/home/jane/scans/a.png`` becomes ``…/a.png``. A folder with a space in its name is recognised only inside the
    home folder and the working directory.
    """
    for folder in (str(Path.cwd()), str(Path.home())):
        if len(folder) > 1:
            text = re.sub(re.escape(folder) + r"(?![\w.-])", "…", text)
    return _FOLDERS.sub("…/", text)


def human_bytes(size: float) -> str:
    """1536 -> ``1.5 kB`` (steps of 1000)."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def human_seconds(seconds: float) -> str:
    """75 -> ``1m15s``."""
    if seconds < 60:
        return f"{seconds:.{int(seconds < 10)}f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
