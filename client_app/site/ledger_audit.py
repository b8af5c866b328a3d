"""Find out whether a site's privacy records are complete, by comparing them with its audit log.

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
    """Return an error text if the ``privacy/`` folder of a site is lost or an older copy, else "".

    The text names what the folder lacks. The audit log has the rounds that were answered, which
    the record of answers must have, and that record has how often each ledger was charged. With
    ``remembers`` and nothing lost, the record keeps how far the log was compared, so that the next
    comparison begins there.
    """
    file = answers_file(root, name)
    log = root / "sites" / name / FILE
    with _record(file) as answers:
        size, lines = _lines_not_compared(log, answers)
        lost = [*_lost_rounds(answers, lines), *_lost_charges(answers, file.parent)]
        if remembers and not lost:
            _, last_hash = answers.get("compared", (0, START))
            if lines:
                last_hash, _, _ = lines[-1]
            answers["compared"] = size, last_hash
    if not lost:
        return ""
    on_record = ", ".join(dict.fromkeys(lost))  # each once
    why = f"lacks what is on record ({on_record}); see Backup and restore in docs/operations.md"
    return f"state-dir: {file.parent} {why}"


@contextmanager
def _record(file: Path) -> Iterator[Answers]:
    """Yield the record of answers, and write back what the block changes in it.

    Where there is no file the record is empty, and no file is made.
    """
    if not file.exists():
        yield {}
        return
    with record_in(file, "what was sent") as answers:
        yield answers


Line = tuple[str, Any, str]  # A line of the audit log: its hash, its content, what is wrong with it


def _lines_not_compared(log: Path, answers: Answers) -> tuple[int, list[Line]]:
    """Return the audit log's size in bytes, and its lines after those that were compared before.

    These are all its lines if the log was replaced since: it is shorter then, or the next line does
    not follow the last one that was compared.
    """
    size = log.stat().st_size if log.exists() else 0
    compared_bytes, last_hash = answers.get("compared", (0, START))
    if size == compared_bytes:
        return size, []
    if size > compared_bytes:
        lines = [*entries(log, compared_bytes, last_hash)]
        if not lines or not lines[0][2]:  # the first line has no fault
            return size, lines
    return size, [*entries(log)] if size else []


def _lost_rounds(answers: Answers, lines: Iterable[Line]) -> Iterator[str]:
    """Name the rounds that were answered according to the log, and are not in the record."""
    last_sent: dict[tuple[str, int], int] = {}
    for _, entry, _ in lines:
        kind = entry.get("kind")
        number = entry.get("round")
        if kind in ("train", "evaluate") and "sent" in entry and type(number) is int:
            key = f"{entry.get('run')} {entry.get('algo')}"
            # the record has the last training round first, and then the final evaluation's
            place = 0 if kind == "train" else 1
            last_sent[key, place] = max(1, number)  # 0 stands for no answer

    for (key, place), number in last_sent.items():
        if answers.get(key, (0, 0))[place] < number:
            yield f"{key} round {number}"


def _lost_charges(answers: Answers, folder: Path) -> Iterator[str]:
    """Name the ledgers in ``folder`` that have fewer charges than the record says."""
    for ledger, charges in answers.get("charged", {}).items():
        if charges_in(read_ledger(folder / ledger)) < charges:
            yield f"charges to {ledger}"
