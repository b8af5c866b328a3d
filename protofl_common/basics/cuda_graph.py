"""A function of tensors that is called again and again: on a GPU it is recorded once and replayed without Python.

What is recorded is a CUDA graph (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A step on a small batch is some hundred kernels of a few microseconds each. Python takes longer to start one than the
GPU takes to run it, so the GPU waits most of the time. A graph starts them all at once.

A function may be replayed if every call does the same: it reads and changes only tensors that stay where they are, it
looks at none of their numbers (``.item()``, ``bool()``, a mask that chooses rows), and Python decides nothing in it
that a later call would decide otherwise.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

WARM_UP = 8  # calls before a shape is recorded: optimizer and cuBLAS make their buffers; fewer calls are not worth it

Results = dict[str, Tensor]
Function = Callable[..., Results]


class Replayed:
    """``function`` of tensors, recorded for each shape of its inputs; the next call overwrites its results."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.calls: Counter[tuple[torch.Size, ...]] = Counter()
        self.recorded: dict[tuple[torch.Size, ...], tuple[tuple[Tensor, ...], Results, Callable[[], None]]] = {}

    def __call__(self, *inputs: Tensor) -> Results:
        shapes = tuple(value.shape for value in inputs)
        if shapes in self.recorded:
            places, results, replay = self.recorded[shapes]
            for place, value in zip(places, inputs, strict=True):
                place.copy_(value)
            replay()
            return results
        self.calls[shapes] += 1
        if self.calls[shapes] <= WARM_UP:
            return self._detached(*inputs)
        places = tuple(value.clone() for value in inputs)
        results, replay = record(partial(self._detached, *places))
        self.recorded[shapes] = places, results, replay
        return results

    def _detached(self, *inputs: Tensor) -> Results:
        return {name: value.detach() for name, value in self.function(*inputs).items()}


def record(call: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
    """Make ``call`` once, as a CUDA graph on a stream of its own: its results, and what makes it again."""
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # what it frees meanwhile would break the recording
    try:
        graph.capture_begin()
        try:
            results = call()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    graph.replay()  # nothing has been computed so far
    return results, graph.replay


@contextmanager
def replaying(function: Function, device: torch.device, same: bool) -> Iterator[Function]:
    """``function``, replayed where that is possible: on a CUDA device, if every call does the ``same``."""
    if not (same and can_replay(device)):
        yield function
        return
    with own_stream(device):
        yield Replayed(function)


def steps_alike(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer keeps on the device what changes from step to step."""
    return all(group.get("capturable", True) for group in optimizer.param_groups)


def can_replay(device: torch.device) -> bool:
    return device.type == "cuda"


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A CUDA stream that begins after all that was asked for, and on which all that comes later waits."""
    torch.cuda.empty_cache()  # the memory of an earlier graph is kept for it alone
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)
