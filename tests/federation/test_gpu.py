"""What is otherwise on a GPU, shown without one: on another device (`pretended.py`).

On a real GPU: ``make test-gpu``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from protofl_common.basics import devices
from protofl_common.experiment.catalog import CATALOG
from tests.support.acting import CASES, left_behind
from tests.support.given import Patch
from tests.support.pretended import GPU, Pretended, pretended_gpu

LIKE_OTHERS = {"local", "protofed", "fedper", "lg-fedavg", "fesem", "fedproto-avg"}
"""Their clients take FedAvg's or FedProto's steps, and their servers do not train: tried in the long tests."""


def on_both(folder: Path, changes: dict[str, Any]) -> tuple[object, object]:
    """What a run leaves behind on the CPU, and on the pretended GPU."""
    changes = {"train_samples": 20, "test_samples": 10, "batch_size": 5} | changes
    on_cpu = left_behind(folder / "cpu", changes)
    with pretended_gpu():
        return on_cpu, left_behind(folder / "gpu", changes)


@pytest.mark.parametrize(
    "algo", [pytest.param(one, marks=[pytest.mark.long] * (one in LIKE_OTHERS)) for one in CATALOG]
)
def test_on_a_gpu_every_algorithm_does_what_it_does_on_the_cpu(algo: str, tmp_path: Path) -> None:
    on_cpu, on_gpu = on_both(tmp_path, {"algo": algo, "batch_size": 3 if algo == "per-fedavg" else 5})
    assert on_gpu == on_cpu


@pytest.mark.parametrize("changes", [
    {"batch_size": 8},
    {"momentum": 0.9, "weight_decay": 0.01, "keep_optimizer": True},
    {"optimizer": "adam"},
    {"models": "resnet4-imagenet-stem", "batch_size": 19},
    {"positive_rate": 0.5, "pu_weight": 1.0},
    {"backbones": "glyphs"},
    {"local_epochs": 3, "algo": "fedtgp", "fedtgp__server_batch_size": 4},
], ids=str)  # fmt: skip
def test_so_it_does_with_other_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    on_cpu, on_gpu = on_both(tmp_path, changes)
    assert on_gpu == on_cpu


@pytest.mark.long
@pytest.mark.parametrize("key", CASES)
def test_so_it_does_with_every_setting(key: str, tmp_path: Path) -> None:
    under, other = CASES[key]
    on_cpu, on_gpu = on_both(tmp_path, under | {key.replace("-", "_").replace(".", "__"): other})
    assert on_gpu == on_cpu


def test_the_pretended_gpu_refuses_company_from_the_cpu() -> None:
    with pretended_gpu():
        there, here = torch.ones(3, device=GPU), torch.ones(3)
        assert isinstance(there, Pretended)
        assert (there + there).device == GPU
        for wrong in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here.add_(there), there.numpy):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()
        assert torch.equal((there + here.to(GPU)).cpu(), torch.full((3,), 2.0))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_cuda_is_made_to_repeat_exactly(precision: str, monkeypatch: Patch) -> None:
    asked: list[object] = []
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append((on, warn_only)))
    monkeypatch.setattr(torch, "empty", lambda *_, device: asked.append(device))
    monkeypatch.setattr("torch.backends.cudnn.benchmark", True)
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert devices.open_device("cuda:1", precision) == torch.device("cuda:1")
    assert asked == [(True, True), torch.device("cuda:1")]
    found = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = before
    assert found == (precision == "tf32",) * 2
    assert not cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
