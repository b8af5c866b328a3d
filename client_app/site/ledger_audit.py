"""Whether a site's records of its privacy are complete, by what is on record elsewhere.

A site whose ``privacy/`` folder was lost, or restored from an older copy, would spend its privacy
once more.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client_app.site.audit import FILE, START, entries
from client_app.site.privacy_ledger import charges_in, read_ledger
from client_app.site.record import record_in

Answers = dict[str, Any]
"""The record of answers: key -> last round and final evaluation (`protections/one_reply.py`).

Beside these stand ``charged``, how often each ledger was charged, and ``compared``, how far the
audit log was compared with the record: the size of the log then, and the hash of its last line.
"""


def answers_file(root: Path, name: str) -> Path:
    """Return the file of a site's record of answers, in its ``state-dir``."""
    return root / "privacy" / f"{name}.answered"


def missing_records(root: Path, name: str, *, remembers: bool = False) -> str:
    """Say what a lost or older ``privacy/`` folder lacks that is on record; "" if it lacks nothing.

    The audit log has the rounds that were answered, and the record of answers how often each ledger
    was charged. With ``remembers`` the record keeps how far the log was compared with it, so that
    the next comparison begins there.
    """
    file = answers_file(root, name)
    log = root / "sites" / name / FILE
    with _record(file) as answers:
        size, lines = _lines_not_compared(log, answers)
        lost = [*_lost_rounds(answers, lines), *_lost_charges(answers, file.parent)]
        if remembers and not lost:
            _, head = answers.get("compared", (0, START))
            answers["compared"] = size, lines[-1][0] if lines else head
    if not lost:
        return ""
    on_record = ", ".join(dict.fromkeys(lost))
    why = f"lacks what is on record ({on_record}); see Backup and restore in docs/operations.md"
    return f"state-dir: {file.parent} {why}"


@contextmanager
def _record(file: Path) -> Iterator[Answers]:
    """Open the record of answers, and write back what the block changes in it.

    Where there is no file, the record is empty, and none is made.
    """
    if not file.exists():
        yield {}
        return
    with record_in(file, "what was sent") as answers:
        yield answers


Line = tuple[str, Any, str]  # A line of the audit log: its hash, its content, what is wrong with it


def _lines_not_compared(log: Path, answers: Answers) -> tuple[int, list[Line]]:
    """The size of the log, and its lines behind those that were compared before.

    If it is another log since then, all its lines.
    """
    compared, head = answers.get("compared", (0, START))
    size = log.stat().st_size if log.exists() else 0
    lines = [*entries(log, compared, head)] if size > compared else []
    does_not_follow = bool(lines) and lines[0][2] != ""
    if size < compared or does_not_follow:  # it is another log
        lines = [*entries(log)] if size else []
    return size, lines


def _lost_rounds(answers: Answers, lines: Iterable[Line]) -> Iterator[str]:
    """What was answered, by the log, and is not in the record of answers."""
    last_sent: dict[tuple[str, int], int] = {}
    for _, entry, _ in lines:
        kind = entry.get("kind")
        number = entry.get("round")
        if kind in ("train", "evaluate") and "sent" in entry and type(number) is int:
            key = f"{entry.get('run')} {entry.get('algo')}"
            which = 0 if kind == "train" else 1  # its place in the record
            last_sent[key, which] = max(1, number)

    for (key, which), number in last_sent.items():
        if answers.get(key, (0, 0))[which] < number:
            yield f"{key} round {number}"


def _lost_charges(answers: Answers, folder: Path) -> Iterator[str]:
    """Ledgers in ``folder`` with fewer charges than were recorded."""
    for ledger, charges in answers.get("charged", {}).items():
        if charges_in(read_ledger(folder / ledger)) < charges:
            yield f"charges to {ledger}"
