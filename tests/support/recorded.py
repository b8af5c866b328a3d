"""CUDA graphs, rehearsed without a GPU: a recording of PyTorch's operations on the tensors that they were called with.

As a graph does, replaying runs no Python of the function again: the same operations, on the same memory, with the same
numbers where these were numbers. What a graph may not do while it is recorded is refused here as well.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protofl_common.basics import cuda_graph
from tests.support.pretended import tensors_in

LOOKS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2", "bincount"}
"""Operations that wait for the GPU: their result, or its shape, is a number that Python needs."""


class RecordingError(RuntimeError):
    """A graph could not do this."""


class Recording(TorchDispatchMode):
    """Notes all operations while it is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        masks = [one for one in tensors_in(args[1:2]) if one.dtype == torch.bool]
        if name in LOOKS or (name in ("index", "index_put", "index_put_") and masks):
            raise RecordingError(f"{name} looks at numbers, which a graph cannot")
        result = function(*args, **kwargs)
        views = [one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns]
        if not (views and all(views)):
            self.calls.append((function, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """All of them again, in place."""
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for before, after in zip(tensors_in(result), tensors_in(again), strict=True):
                if before is not after:
                    before.copy_(after)


@contextmanager
def rehearsal() -> Iterator[list[int]]:
    """While this lasts, every device has graphs; the number of operations of each that was recorded."""
    recorded: list[int] = []

    def noted(call: Callable[[], cuda_graph.Results]) -> tuple[cuda_graph.Results, Callable[[], None]]:
        with Recording() as recording:
            results = call()
        recorded.append(len(recording.calls))
        return results, recording.replay

    @contextmanager
    def no_stream(device: torch.device) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "WARM_UP", 1)
        patch.setattr(cuda_graph, "can_replay", lambda device: True)
        patch.setattr(cuda_graph, "own_stream", no_stream)
        patch.setattr(cuda_graph, "record", noted)
        yield recorded
