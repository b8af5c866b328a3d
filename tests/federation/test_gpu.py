"""What is otherwise on a GPU, shown without one, on a GPU that is none. On a real one: ``make test-gpu``.

Its tensors say that they are on another device, refuse company from the CPU, and compute there. What mixes devices, or
hands NumPy a tensor of the GPU, fails as it would on one; the numbers are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from client_app import training
from protofl_common.basics import devices
from protofl_common.experiment.catalog import CATALOG
from tests.support.acting import CASES, left_behind
from tests.support.given import Patch

GPU = torch.device("meta")
"""Not ``cuda``, of which autograd asks the driver."""


class Pretended(Tensor):
    """Says that ``real``, a tensor on the CPU, is on the GPU."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> Pretended:
        facts = {
            "dtype": real.dtype,
            "device": GPU,
            "strides": real.stride(),
            "storage_offset": real.storage_offset(),
        }
        made: Pretended = torch.Tensor._make_wrapper_subclass(cls, real.shape, **facts)
        made.on_cpu = real
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return called(function, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"on the GPU: {self.on_cpu!r}"


def each(change: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in it changed; ten times as fast as PyTorch's own."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([each(change, one) for one in value])
    return (
        {key: each(change, one) for key, one in value.items()} if isinstance(value, dict) else value
    )


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors in the values, in order."""
    found: list[Tensor] = []
    each(found.append, values)
    return found


class Mode(TorchDispatchMode):
    """Catches what makes tensors as well."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return called(function, args, kwargs or {})


def called(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation, on the device of its arguments or on the one that it names."""
    tensors = tensors_in(args, kwargs)
    there = any(isinstance(one, Pretended) for one in tensors)
    name, wanted = function._schema.name.removeprefix("aten::"), kwargs.get("device")
    copies = name in ("copy_", "_to_copy")
    here = [one for one in tensors if one.dim() and not isinstance(one, Pretended)]
    if there and here and not copies:
        places = name in ("index", "index_put", "index_put_")  # rows may be named from the CPU
        if not (places and all(one.dtype in (torch.int64, torch.bool) for one in here)):
            raise RuntimeError(f"{name}: expected all tensors to be on one device, but found both")
    result_there = torch.device(wanted) == GPU if wanted is not None else there
    if name == "copy_":
        result_there = isinstance(args[0], Pretended)
    elif name == "_local_scalar_dense":
        result_there = False
    real_args, real_kwargs = each(
        lambda one: one.on_cpu if isinstance(one, Pretended) else one, (args, kwargs)
    )
    if wanted is not None:
        real_kwargs["device"] = "cpu"
    result = function(*real_args, **real_kwargs)
    known = {id(one.on_cpu): one for one in tensors if isinstance(one, Pretended)}
    if not result_there:
        return result
    return each(lambda one: known[id(one)] if id(one) in known else Pretended(one), result)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """While this lasts, clients and server find the GPU."""
    with pytest.MonkeyPatch.context() as patch, Mode():
        for room in ("client_app.client", "server_app.training"):
            patch.setattr(f"{room}.open_device", lambda name, precision: GPU)
        patch.setattr("torch.__future__._overwrite_module_params_on_conversion", True)
        patch.setattr(
            "torch.inference_mode.__enter__", torch.no_grad.__enter__
        )  # which such tensors cannot
        patch.setattr("torch.inference_mode.__exit__", torch.no_grad.__exit__)
        made = torch.tensor
        patch.setattr(
            "torch.tensor", lambda *args, device=None, **options: made(*args, **options).to(device)
        )
        yield


LIKE_OTHERS = {"local", "protofed", "fedper", "lg-fedavg", "fesem", "fedproto-avg"}
"""Their clients take FedAvg's or FedProto's steps, and their servers do not train: tried in the long tests."""


def on_both(folder: Path, changes: dict[str, Any]) -> tuple[object, object]:
    """What a run leaves behind on the CPU, and on the pretended GPU."""
    changes = {"train_samples": 20, "test_samples": 10, "batch_size": 5} | changes
    with patch.object(
        training, "_fused_where_in_order", lambda adam, *_: adam.param_groups[0].update(fused=False)
    ):
        on_cpu = left_behind(
            folder / "cpu", changes
        )  # with the Adam of a GPU, which rounds otherwise
    with pretended_gpu():
        return on_cpu, left_behind(folder / "gpu", changes)


@pytest.mark.parametrize(
    "algo", [pytest.param(of, marks=[pytest.mark.long] * (of in LIKE_OTHERS)) for of in CATALOG]
)
def test_on_a_gpu_every_algorithm_does_what_it_does_on_the_cpu(algo: str, tmp_path: Path) -> None:
    on_cpu, on_gpu = on_both(
        tmp_path, {"algo": algo, "batch_size": 3 if algo == "per-fedavg" else 5}
    )
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
        for wrong in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: here.add_(there),
            there.numpy,
        ):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()
        assert torch.equal((there + here.to(GPU)).cpu(), torch.full((3,), 2.0))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_cuda_is_made_to_repeat_exactly(precision: str, monkeypatch: Patch) -> None:
    asked: list[object] = []
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append((on, warn_only))
    )
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
