"""The audit log of a site: a line of JSON for each reply, approval and refusal, chained by hashes.

Each line has the SHA-256 of the line before. The hash of the last one goes out with each reply, the
server keeps it in ``heads.jsonl``, and tells the site in each later round and run: a site whose log
lacks that line (`has_line`) refuses. What cannot be recorded does not leave. `refuse` says which
refusals have a line.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from typing import IO, Any

from client_app.site.record import StateError, record_in
from protofl_common.basics.files import digest, locked

FILE = "audit.jsonl"
START = "0" * 64  # stands for the line before the first
_LONGEST = 2**17  # bytes of a line
MOST_REFUSALS = 200  # that differ, in a day


class AuditError(RuntimeError):
    """The audit log cannot be written, so nothing may leave."""


def append(folder: Path, **entry: Any) -> str:
    """Append a line with these values and the time to the log in ``folder``; return its hash.

    When this returns, the line is on the disk. AuditError where that fails.
    """
    path = folder / FILE
    try:
        with locked(path), open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as log:
            last_line = _last_line(log)  # and moves to the end, where the new line goes
            before = hash_of(last_line) if last_line else START
            time = datetime.now().astimezone().isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, **entry, "before": before}).encode()
            if len(line) >= _LONGEST:
                raise OSError(errno.EFBIG, f"a line of {len(line)} bytes")
            log.write(line + b"\n")
            log.flush()
            os.fsync(log.fileno())
    except OSError as error:
        raise AuditError(f"state-dir: {path.absolute()} cannot be written ({error})") from error
    return hash_of(line)


def has_line(folder: Path, head: str) -> bool:
    """Return whether the log in ``folder`` has a line with the hash ``head``."""
    path = folder / FILE
    if not path.exists():
        return False
    newest_first = reversed(path.read_bytes().split(b"\n"))
    return any(hash_of(line) == head for line in newest_first)


def refuse(folder: Path, reason: str, waits: bool, **about: Any) -> tuple[str, bool]:
    """Append a refusal to the log at its 1st, 2nd, 4th … time in a day.

    Returns the reason that may leave the site, and whether it was appended. Few repetitions are
    appended so that whoever is refused again and again cannot fill the disk. ``about`` is what the
    refused message was about.

    Once `MOST_REFUSALS` kinds have been refused in a day, those of any further kind are counted
    together, and their own reasons do not leave the site, because they are not in the log. The
    limit does not hold for a site that ``waits`` for its operator: such reasons differ only from
    one request for approval to the next, so there are few. AuditError where nothing can be written.
    """
    today = date.today().isoformat()
    # a server may send another run, round or name with each message: they make no new kind
    kind = digest(reason, {} if waits else {**about, "round": 0, "run": 0, "name": ""})
    try:
        with record_in(folder / "refusals.json", "how often a message was refused") as days:
            counts = days.pop(today, {})
            if kind not in counts and len(counts) >= MOST_REFUSALS and not waits:
                kind = "others"
                reason = f"more than {MOST_REFUSALS} refusals today; the log of the site says more"
            times = counts.get(kind, 0) + 1
            counts[kind] = times
            is_appended = times.bit_count() == 1  # a power of two
            if is_appended:
                append(folder, **about, refused=reason, times=times)
            days.clear()  # earlier days no longer count
            days[today] = counts
    except StateError as error:
        raise AuditError(str(error)) from error
    return reason, is_appended


def hash_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _last_line(log: IO[bytes]) -> bytes:
    """Return the last whole line of the file, b"" if it has none, and move to its end.

    Half a line, left by a kill or a full disk, is cut off the file.
    """
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LONGEST))  # no line is longer
    *lines, half_line = log.read().split(b"\n")
    if half_line:
        log.truncate(size - len(half_line))
    log.seek(0, os.SEEK_END)
    return lines[-1] if lines else b""


def entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield the hash, the content and the fault ("" if there is none) of each line of an audit log.

    A line that is no JSON object has the content {}.
    """
    before = START
    with path.open("rb") as log:
        for number, line in enumerate(log, 1):
            entry: dict[str, Any] = {}
            with suppress(ValueError, TypeError):
                entry = {**json.loads(line)}

            wrong = ""
            if not line.endswith(b"\n"):
                wrong = (
                    "is no whole line of the log: cut short by a full disk or a kill; "
                    "nothing was sent for it, the next replaces it"
                )
            elif not entry:
                wrong = "is no whole line of the log"
            if entry and entry.get("before") != before:
                wrong = "does not follow the line before it: one was changed, moved or removed"

            before = hash_of(line.rstrip(b"\n"))
            yield before, entry, f"line {number} {wrong}" if wrong else ""
