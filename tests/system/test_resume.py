"""A deployed run whose SuperLink and worker are killed in the middle.

`test_table_shards` kills simulated ones.
"""

import json
import sqlite3
from contextlib import ExitStack, closing

import pytest

from protofl_common.runs.folder import HEADS
from tests.support.processes import output_of
from tests.support.standing import Standing

pytestmark = pytest.mark.system


def test_a_deployed_run_outlives_its_superlink_and_goes_on_by_itself_after_its_worker(tmp_path):
    """The SuperLink is killed after round 1, and the worker after round 2; both are started again.

    The new worker submits a run that resumes the first. In the end `protofl retain` removes what
    the run has left at the server and in the SuperLink's database, but not the heads of logs.
    """
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
        assert standing.wait_for_end() == "finished:completed", standing.logs()
        summary = json.loads((tmp_path / "runs" / "stopped" / "summary.json").read_text())
        # the worker may have finished round 3 before it was killed
        assert summary["resumed-after-rounds"] in ([2], [3])
        assert sum(summary["trouble"].values()) == 0, standing.printed()

        database = tmp_path / "superlink.db"
        options = ["--days", "0", "--runs", str(tmp_path / "runs"), "--database", str(database)]
        report = output_of(["protofl", "retain", *options], standing.env)
        assert f"removed  {tmp_path / 'runs' / 'stopped'}, ended " in report
        assert not (tmp_path / "runs" / "stopped").exists()
        assert (tmp_path / "runs" / HEADS).exists()
        with closing(sqlite3.connect(database)) as link:
            for table in ("message_ins", "message_res", "message", "objects", "task_logs"):
                assert link.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), report
        assert len(standing.runs()) == 2, "the SuperLink goes on, and has both"
