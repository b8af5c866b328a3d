"""The server's training on vectors that clients have sent, on a GPU where there is one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from protofl_common.algorithms.base import ServerTrainingHparams
from protofl_common.config.sections import MachineSettings
from protofl_common.models.devices import open_device
from protofl_common.tasks import Task

SMALL_STEP = 2**24  # Multiplications of a forward pass that threads make no faster


def server_device(machine: MachineSettings) -> torch.device:
    """Return CUDA where there is one and the clients' ``device`` allows it, else the CPU."""
    device = "auto" if machine.device.startswith(("auto", "cuda")) else "cpu"
    return open_device(device, machine.precision)


def loss_of(task: Task, module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss for `train` by which ``module`` learns to classify vectors."""
    return lambda vectors, classes: task.loss(module(vectors), task.labels_of(classes))


def train(
    loss: Callable[..., Tensor],
    vectors: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    hparams: ServerTrainingHparams,
    generator: torch.Generator,
    min_rows: int = 1,
    forward_rows: int = 0,
) -> float:
    """Train the optimizer's parameters on ``vectors`` for ``server-epochs`` epochs.

    ``vectors`` are tensors of P rows each, on any device; ``loss`` gets the rows of a shuffled
    minibatch of each tensor. A minibatch of fewer than ``min_rows`` rows is left out. Returns the
    mean loss of the last epoch.

    Small steps use one thread, as more make them no faster. Their size is judged by the rows that
    pass through the trained module: ``forward_rows``, or those of a minibatch if that is 0.
    """
    trained: list[Tensor] = []
    for group in optimizer.param_groups:
        trained += group["params"]
    device = trained[0].device
    vectors = [tensor.to(device) for tensor in vectors]
    count = len(vectors[0])
    batch_size = min(count, hparams.server_batch_size or count)  # 0: all in one batch

    # one for each parameter and row
    multiplications = (forward_rows or batch_size) * sum(parameter.numel() for parameter in trained)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if multiplications < SMALL_STEP else threads)
    try:
        for _ in range(hparams.server_epochs):
            total = torch.zeros((), dtype=torch.float64, device=device)
            seen = 0
            order = torch.randperm(count, generator=generator).to(device)
            shuffled = [tensor[order].split(batch_size) for tensor in vectors]
            for minibatch in zip(*shuffled, strict=True):
                rows = len(minibatch[0])
                if rows < min_rows:
                    continue
                value = loss(*minibatch)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                total = total + value.detach().double() * rows
                seen += rows
    finally:
        torch.set_num_threads(threads)
    return total.item() / max(1, seen)  # 0 if every minibatch was too small
