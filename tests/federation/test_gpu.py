"""What is otherwise on a GPU, shown on a GPU that is none. On a real one: ``make test-gpu``.

Its tensors say that they are on another device, refuse company from the CPU, and compute there.
What mixes devices, or hands NumPy a tensor of the GPU, fails as it would on one; the numbers are
those of the CPU.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from client_app.learning import training
from protofl_common.experiment.catalog import CATALOG
from protofl_common.models import devices
from tests.support.acting import CASES, left_behind

GPU = torch.device("meta")
"""Not ``cuda``, of which autograd asks the driver."""


class Pretended(Tensor):
    """Says that ``real``, a tensor on the CPU, is on the GPU."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, real):
        facts = {
            "dtype": real.dtype,
            "device": GPU,
            "strides": real.stride(),
            "storage_offset": real.storage_offset(),
        }
        made = torch.Tensor._make_wrapper_subclass(cls, real.shape, **facts)
        made.on_cpu = real
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return called(function, args, kwargs or {})

    def __repr__(self, **_):
        return f"on the GPU: {self.on_cpu!r}"


def each(change, value):
    """Return ``value`` with every tensor in it changed, in lists, tuples and dictionaries, too.

    This is ten times as fast as PyTorch's own function for it.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([each(change, entry) for entry in value])
    if isinstance(value, dict):
        return {key: each(change, entry) for key, entry in value.items()}
    return value


def tensors_in(*values):
    """Return all tensors in the values, in order."""
    found = []
    each(found.append, values)  # what it returns is not needed
    return found


class Mode(TorchDispatchMode):
    """Catches operations without a pretended tensor, too: those that make one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return called(function, args, kwargs or {})


def called(function, args, kwargs):
    """Do a PyTorch operation on the CPU, and pretend that the result is where it would be.

    That is on the device that the operation names, or else on that of its arguments. RuntimeError
    if these are on both devices.
    """
    name = function._schema.name.removeprefix("aten::")
    tensors = tensors_in(args, kwargs)
    pretended = [tensor for tensor in tensors if isinstance(tensor, Pretended)]
    if pretended and name not in ("copy_", "_to_copy"):
        refuse_company(name, tensors)

    device = kwargs.get("device")
    on_gpu = bool(pretended) if device is None else torch.device(device) == GPU
    if name == "copy_":  # into the first argument
        on_gpu = isinstance(args[0], Pretended)
    elif name == "_local_scalar_dense":  # `item()`, which gives a number
        on_gpu = False

    real_args, real_kwargs = each(on_the_cpu, (args, kwargs))
    if device is not None:
        real_kwargs["device"] = "cpu"
    result = function(*real_args, **real_kwargs)
    if not on_gpu:
        return result
    # an operation in place returns an argument: it must be the same object
    known = {id(tensor.on_cpu): tensor for tensor in pretended}
    return each(lambda real: known[id(real)] if id(real) in known else Pretended(real), result)


def on_the_cpu(tensor):
    return tensor.on_cpu if isinstance(tensor, Pretended) else tensor


def refuse_company(name, tensors):
    """Raise RuntimeError, as PyTorch does, if a tensor is on the CPU and others on the GPU.

    Tensors without dimensions are numbers, which may be, and so may the rows that are indexed.
    """
    for tensor in tensors:
        if isinstance(tensor, Pretended) or not tensor.dim():
            continue
        takes_index = name in ("index", "index_put", "index_put_")
        is_index = takes_index and tensor.dtype in (torch.int64, torch.bool)
        if not is_index:
            raise RuntimeError(f"{name}: expected all tensors to be on one device, but found both")


@contextmanager
def pretended_gpu():
    """Let clients and server find the pretended GPU while the block lasts."""
    make = torch.tensor

    def made(*args, device=None, **options):
        """Do what `torch.tensor` does, in two operations, of which the second is caught."""
        return make(*args, **options).to(device)

    with pytest.MonkeyPatch.context() as monkeypatch, Mode():
        for room in ("client_app.site.workshop", "server_app.learning.training"):
            monkeypatch.setattr(f"{room}.open_device", lambda name, precision: GPU)
        monkeypatch.setattr("torch.__future__._overwrite_module_params_on_conversion", True)
        # such tensors cannot do without gradients as `inference_mode` does
        monkeypatch.setattr("torch.inference_mode.__enter__", torch.no_grad.__enter__)
        monkeypatch.setattr("torch.inference_mode.__exit__", torch.no_grad.__exit__)
        monkeypatch.setattr("torch.tensor", made)
        yield


LIKE_OTHERS = {"local", "protofed", "fedper", "lg-fedavg", "fesem", "fedproto-avg"}
"""Their clients take FedAvg's or FedProto's steps, and their servers do not train.

They are tried in the long tests.
"""


ALGORITHMS = [
    pytest.param(algo, marks=[pytest.mark.long] if algo in LIKE_OTHERS else []) for algo in CATALOG
]


def assert_the_same_on_both(folder, changes):
    """A run leaves the same behind on the CPU and on the pretended GPU."""
    settings = {"train_samples": 20, "test_samples": 10, "batch_size": 5} | changes
    with pytest.MonkeyPatch.context() as monkeypatch:
        # fused only on a CPU, where Adam then rounds otherwise than on the pretended GPU
        monkeypatch.setattr(
            training,
            "_fused_where_in_order",
            lambda adam, *_: adam.param_groups[0].update(fused=False),
        )
        on_cpu = left_behind(folder / "cpu", settings)
    with pretended_gpu():
        on_gpu = left_behind(folder / "gpu", settings)
    assert on_gpu == on_cpu


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_on_a_gpu_every_algorithm_does_what_it_does_on_the_cpu(algo, tmp_path):
    # its batches have twice the size: of 20 samples three of six, and a rest of two
    batch_size = 3 if algo == "per-fedavg" else 5
    assert_the_same_on_both(tmp_path, {"algo": algo, "batch_size": batch_size})


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 8},
        {"momentum": 0.9, "weight_decay": 0.01, "keep_optimizer": True},
        {"optimizer": "adam"},
        {"models": "resnet4-imagenet-stem", "batch_size": 19},
        {"positive_rate": 0.5, "pu_weight": 1.0},
        {"backbones": "glyphs"},
        {"local_epochs": 3, "algo": "fedtgp", "fedtgp__server_batch_size": 4},
    ],
    ids=str,
)
def test_on_a_gpu_chosen_settings_do_what_they_do_on_the_cpu(changes, tmp_path):
    assert_the_same_on_both(tmp_path, changes)


@pytest.mark.long
@pytest.mark.parametrize("key", CASES)
def test_on_a_gpu_every_setting_does_what_it_does_on_the_cpu(key, tmp_path):
    settings, other = CASES[key]
    name = key.replace("-", "_").replace(".", "__")
    assert_the_same_on_both(tmp_path, settings | {name: other})


def test_the_pretended_gpu_refuses_company_from_the_cpu():
    """Tensors there and here can be brought together, but not mixed, as on a real GPU."""
    with pretended_gpu():
        there = torch.ones(3, device=GPU)
        here = torch.ones(3)
        assert isinstance(there, Pretended)
        assert (there + there).device == GPU
        assert torch.equal((there + here.to(GPU)).cpu(), torch.full((3,), 2.0))
        for wrong in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: here.add_(there),
            there.numpy,
        ):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_cuda_is_made_to_repeat_exactly(precision, monkeypatch):
    """Opening a device asks PyTorch for deterministic algorithms, and touches the device.

    TensorFloat-32 is allowed only with the precision tf32.
    """
    asked = []
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append((on, warn_only))
    )
    monkeypatch.setattr(torch, "empty", lambda *_, device: asked.append(device))
    monkeypatch.setattr("torch.backends.cudnn.benchmark", True)
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")

    device = devices.open_device("cuda:1", precision)
    of_products = matmul.allow_tf32
    of_convolutions = cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = before

    assert device == torch.device("cuda:1")
    # for algorithms that repeat, with a warning where there is none, and for a tensor on the device
    assert asked == [(True, True), device]
    assert of_products == of_convolutions == (precision == "tf32")
    assert not cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
