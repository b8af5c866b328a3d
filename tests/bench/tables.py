"""``protofl table`` with its runs in this process, one thread and no Flower processes: a quarter of the time.

    python -m tests.bench.tables configs/tables/tuned.yaml --search --data-dir /data    # as protofl table

For the documents' tables of many small runs. What is finished counts for `protofl table` as well, and the other way.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from protofl_common.settings import default_run_config
from protofl_common.tools.cli import main, table
from protofl_common.tools.tables.execute import Launch
from protofl_common.tools.tables.plan import Run
from tests.harness import run_app


def launch(run: Run, folder: Path, resume: bool, on_round: Callable[[int], None]) -> str:
    """See `protofl_common.tools.tables.execute.Launch`; the server's lines go to the run's own log."""
    here = {"out-dir": str(folder), "run-name": run.name, "resume": resume, "device": "cpu", "threads": 1}
    log = folder.parent / "logs" / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    with log.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        try:
            run_app(  # with an id of its own, by which a resumed run is known
                default_run_config() | run.config | here, int(run.federation["num-supernodes"]), run_id=time.time_ns()
            )
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            print(f"{time.process_time() - began:.2f} seconds of CPU")
    return ""


@contextlib.contextmanager
def launcher(_: Any) -> Iterator[Launch]:
    """In the place of `flower_launcher`."""
    yield launch


if __name__ == "__main__":
    torch.set_num_threads(1)
    table.flower_launcher = launcher  # type: ignore[assignment]
    sys.exit(main(["table", *sys.argv[1:]]))
