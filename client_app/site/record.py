"""A site's records on disk, and the errors of a site that cannot use its own.

No PyTorch: a SuperNode, and commands of a site, read records, and would keep it in memory for that.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protofl_common.basics.files import locked, write_text
from protofl_common.wire.schema import RefusedMessage


class LedgerError(RuntimeError):
    """The privacy ledger cannot be locked, read or written; the message says which file and why."""


class StateError(RuntimeError):
    """The state on disk cannot be used, or not be written; the message says which file and why."""


@contextmanager
def record_in(path: Path, unknown: str) -> Iterator[dict[str, Any]]:
    """Lock a site's record, and write what the block changes; a block that fails changes nothing.

    The record is {} where there is no file yet. StateError, which says what is ``unknown`` then,
    for a file that cannot be used, or whose content is another.
    """
    try:
        with locked(path):
            record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            before = json.dumps(record)
            yield record
            after = json.dumps(record)
            if after != before:
                write_text(path, after + "\n", private=True)
    except RefusedMessage:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StateError(
            f"state-dir: {path} cannot be read or written ({error}): {unknown} is not known"
        ) from error
