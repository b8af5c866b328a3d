"""A deployed run whose SuperLink and worker are killed in the middle.

`test_table_shards` kills simulated ones.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.standing import Standing

pytestmark = pytest.mark.system


def test_a_deployed_run_outlives_its_superlink_and_is_goes_on_by_itself_after_its_worker(
    tmp_path: Path,
) -> None:
    with ExitStack() as running:
        standing = Standing(tmp_path, running)
        standing.start_superlink()
        worker = f"protofl worker --out-dir {tmp_path / 'runs'}"
        standing.start_worker(worker)
        for index, site in enumerate(("north", "south")):
            standing.start_site(site, index, 2)
        config = {"rounds": 4, "run-name": "stopped", "num-clients": 2}
        standing.submit(config)
        standing.wait_for_rounds("stopped", 1)
        standing.kill("superlink")
        standing.start_superlink()
        standing.wait_for_rounds("stopped", 2)
        standing.kill("worker")
        standing.start_worker(worker)
        standing.wait(lambda: len(standing.runs()) == 2, pause=1)
        assert standing.finished() == "finished:completed", standing.logs()
        summary = json.loads((tmp_path / "runs" / "stopped" / "summary.json").read_text())
        assert summary["resumed-after-rounds"] in ([2], [3])
        assert sum(summary["trouble"].values()) == 0, standing.printed()
