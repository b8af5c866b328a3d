"""Find out whether a site's privacy records are complete, by comparing them with its audit log.

A site whose ``privacy/`` folder was lost, or restored from an older copy, would spend its privacy
once more.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from client_app.site.audit import FILE, entries
from client_app.site.privacy_ledger import charges_in, read_ledger
from client_app.site.record import record_in

AnswerRecord = dict[str, Any]
"""A site's record of answers, which lies in its `answers_file`.

Flower run and algorithm -> the last training round and the final evaluation that were answered, 0
for none; the evaluation has the number of the last round. `protections/one_reply.py` writes these.
``charged`` -> ledger -> how often it was charged, which `differential_privacy.py` writes.
"""


def answers_file(root: Path, name: str) -> Path:
    """Return the file of a site's record of answers, in its ``state-dir``."""
    return root / "privacy" / f"{name}.answered"


def missing_records(root: Path, name: str) -> str:
    """Return an error text if the ``privacy/`` folder of a site is lost or an older copy, else "".

    The text names what the folder lacks. The audit log has the rounds that were answered, which
    the record of answers must have, and that record has how often each ledger was charged.
    """
    file = answers_file(root, name)
    log = root / "sites" / name / FILE
    # `record_in` would make a lock file where there is no record
    record: AbstractContextManager[AnswerRecord] = nullcontext({})
    if file.exists():
        record = record_in(file, "what was sent")
    with record as answers:
        lost = [*_lost_rounds(answers, log), *_lost_charges(answers, file.parent)]
    if not lost:
        return ""
    on_record = ", ".join(dict.fromkeys(lost))  # each once
    return (
        f"state-dir: {file.parent} lacks what is on record ({on_record});"
        " see Backup and restore in docs/operations.md"
    )


def _lost_rounds(answers: AnswerRecord, log: Path) -> Iterator[str]:
    """Name the rounds that were answered according to the log, and are not in the record."""
    if not log.exists():
        return
    last_sent: dict[tuple[str, int], int] = {}
    for _, entry, _ in entries(log):
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


def _lost_charges(answers: AnswerRecord, folder: Path) -> Iterator[str]:
    """Name the ledgers in ``folder`` that have fewer charges than the record says."""
    for ledger, charges in answers.get("charged", {}).items():
        if charges_in(read_ledger(folder / ledger)) < charges:
            yield f"charges to {ledger}"
