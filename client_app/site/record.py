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
def record_in(path: Path, lost: str) -> Iterator[dict[str, Any]]:
    """Yield a site's JSON record under a lock, and write it back if the block has changed it.

    The record is {} where there is no file yet. A block that raises changes nothing. StateError
    where the file cannot be used, or where the block raises ValueError, TypeError or AttributeError
    because it finds other content than it expects; the text says that ``lost``, such as "what was
    sent", is not known.
    """
    try:
        with locked(path):
            record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            before = json.dumps(record)
            yield record
            after = json.dumps(record)
            if after != before:
                write_text(path, after + "\n", private=True)
    except RefusedMessage:  # a ValueError of the block's, and no fault of the file
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StateError(
            f"state-dir: {path} cannot be read or written ({error}): {lost} is not known"
        ) from error
