"""On a real CUDA device, and skipped elsewhere: ``make test-gpu``. What can be shown without one is in test_gpu.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import MessageType

from protofl_common.experiment.catalog import CATALOG
from tests.support.accidents import Killed, on_message
from tests.support.acting import SMALL, left_behind
from tests.support.harness import run_config, run_federation
from tests.support.processes import superlink
from tests.support.results import digests, without_times

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TRAINED: dict[str, Any] = SMALL | {"train_samples": 60, "batch_size": 2, "device": "cuda"}
"""Thirty steps a round."""
SETTINGS: list[dict[str, Any]] = [
    *({"algo": algo} for algo in CATALOG),
    {"optimizer": "adam", "keep_optimizer": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"models": "resnet4-imagenet-stem"},
    {"models": "resnet18", "batch_size": 4},
    {"precision": "tf32"},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_the_same_seed_gives_the_same_run(changes: dict[str, Any], tmp_path: Path) -> None:
    assert left_behind(tmp_path / "one", TRAINED | changes) == left_behind(
        tmp_path / "two", TRAINED | changes
    )


@pytest.mark.parametrize("algo", CATALOG)
def test_the_figures_are_nearly_those_of_the_cpu(algo: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    losses = []
    for device in ("cuda", "cpu"):
        wanted = TRAINED | {"algo": algo, "device": device}
        clients = wanted.pop("clients")
        rows = run_federation(run_config(folder / device, **wanted), clients).rows
        losses.append([row["losses"]["total"] for row in rows if row["losses"]])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] or algo in ("gaussian", "mpft")  # whose clients train nothing


def test_a_resumed_run_is_an_undisturbed_one(tmp_path: Path) -> None:
    wanted = TRAINED | {"algo": "fedtgp", "rounds": 3, "run_name": "run"}
    clients = wanted.pop("clients")
    whole = run_federation(run_config(tmp_path / "whole", **wanted), clients)
    with pytest.raises(Killed):
        run_federation(
            run_config(tmp_path / "parts", **wanted), clients, on_message(MessageType.TRAIN, 2)
        )
    resumed = run_federation(
        run_config(tmp_path / "parts", resume=True, **wanted), clients, run_id=4712
    )
    assert without_times(resumed.rows) == without_times(whole.rows)
    assert digests(resumed.folder) == digests(whole.folder)


def test_fifty_clients_need_no_more_memory_than_five(tmp_path: Path) -> None:
    needed = []
    for clients in (5, 50):
        torch.cuda.reset_peak_memory_stats()
        left_behind(tmp_path / str(clients), TRAINED | {"clients": clients})
        needed.append(torch.cuda.max_memory_reserved())
    assert needed[1] <= 1.2 * needed[0]


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with superlink(tmp_path_factory.mktemp("superlink"), "--simulation") as one:
        yield one


def test_two_clients_share_the_device(connection: Any, tmp_path: Path) -> None:
    """By Ray, each in a process of its own, and as one after the other."""
    rows = []
    for part in (1.0, 0.5):
        name = f"part-{part}"
        settings = {
            "rounds": 2,
            "train-samples": 20,
            "test-samples": 20,
            "out-dir": str(tmp_path),
            "run-name": name,
        }
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        options = f"num-supernodes=4 client-resources-num-cpus=1 client-resources-num-gpus={part}"
        output, status = connection.run(
            "--federation-config", options, "--run-config", text, timeout=600
        )
        assert status == "finished:completed", output
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows.append(without_times([json.loads(line) for line in lines]))
    assert "cuda" in output
    assert rows[0] == rows[1]
