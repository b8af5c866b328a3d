"""One round of moments with four real sites, plain and summed, beside one place."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofl_common.maths.gaussian import ClassMoments
from protofl_common.tools.cli import main
from tests.support.harness import client_of, run_config
from tests.support.standing import Standing

pytestmark = [pytest.mark.system, pytest.mark.long]
ONE_ROUND = {"algo": "gaussian", "rounds": 1, "backbones": "glyphs", "liars": 0, "report": False}


def test_moments_of_four_supernodes_are_those_of_one_place(tmp_path: Path) -> None:
    """Plain, summed, without a site, and with it again later, which alone is asked then. Seconds are printed."""
    seconds: dict[str, float] = {}

    def finish(run: str, clients: int, **more: Any) -> None:
        start = time.monotonic()
        here.submit(ONE_ROUND | {"run-name": run, "num-clients": clients, "min-clients": clients, **more})
        assert here.finished(600) == "finished:completed", here.logs() + here.printed()
        assert [row["valid"] for row in here.rows(run)] == 2 * [clients]
        seconds[run] = time.monotonic() - start
        print(run, f"{seconds[run]:.1f} s", [row["seconds"] for row in here.rows(run)])

    with ExitStack() as running:
        here = Standing(tmp_path, running)
        here.start_superlink()
        here.start_worker()
        for index in range(4):
            here.start_site(f"site-{index}", index, 4, program="protofl site run")
        finish("plain", 4, **{"gaussian.revocable": True})
        finish("summed", 4, secagg=True)
        finish("again", 4)
        _assert_moments(tmp_path, "plain", 0, 1, 2, 3)
        _assert_moments(tmp_path, "summed", 0, 1, 2, 3)
        assert main(["forget", str(tmp_path / "runs" / "plain"), "--site", "site-0"]) == 0
        _assert_moments(tmp_path, "plain", 1, 2, 3)
        for index in range(1, 4):
            here.kill(f"site-{index}")
        finish("later", 1, **{"gaussian.start-from": str(tmp_path / "runs" / "plain")})
        _assert_moments(tmp_path, "later", 0, 1, 2, 3)
    assert seconds["summed"] < 2 * seconds["again"]  # the first run of all waits for imports


def _assert_moments(folder: Path, run: str, *partitions: int) -> None:
    """The run has the moments of these sites' features together, to 1e-6 of the largest."""
    small = {"dataset": "digits", "partition": "iid", "train_samples": 30, "test_samples": 30, "algo": "gaussian"}
    config = run_config(folder / "one-place", **small, backbones="glyphs")
    sets = [client_of(config, **{"partition-id": index, "num-partitions": 4}).train_set for index in partitions]
    moments = ClassMoments(10, 128, "lda")
    moments.measure(torch.cat([one.in_memory for one in sets]), torch.cat([one.labels for one in sets]))
    state = load_file(folder / "runs" / run / "checkpoints" / "000001.safetensors")
    for name, value in moments.named_buffers():
        torch.testing.assert_close(state[f"moments/{name}"], value, rtol=0, atol=1e-6 * float(value.abs().max()))
