"""Training on the vectors that clients have sent, for servers that do: on a GPU where there is one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protofl_common.basics.devices import open_device
from protofl_common.config.sections import MachineSettings
from protofl_common.experiment.catalog import ServerTrainingHparams

SMALL_STEP = 2**24  # Multiplications of a forward pass; threads make no smaller one faster


def server_device(machine: MachineSettings) -> torch.device:
    """Return the server's device: CUDA where there is one and the clients' ``device`` allows it, else the CPU."""
    return open_device("auto" if machine.device.startswith(("auto", "cuda")) else "cpu", machine.precision)


def classified_by(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a `loss` for `train`: the cross-entropy of what ``module`` returns for vectors with labels."""
    return lambda vectors, labels: cross_entropy(module(vectors), labels)


def train(
    loss: Callable[..., Tensor],
    vectors: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    hparams: ServerTrainingHparams,
    generator: torch.Generator,
    fewest: int = 1,
    passed: int = 0,
) -> float:
    """``server-epochs`` passes over the vectors in shuffled minibatches; the mean loss of the last pass.

    ``loss`` gets the rows of a minibatch of each of ``vectors`` [P, …], which may be on another device; a minibatch of
    less than ``fewest`` is left out. ``passed``: how many rows pass through what is trained, if not the minibatch.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = trained[0].device
    vectors = [each.to(device) for each in vectors]
    count = len(vectors[0])
    batch = min(count, hparams.server_batch_size or count)
    multiplications = (passed or batch) * sum(parameter.numel() for parameter in trained)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if multiplications < SMALL_STEP else threads)
    try:
        for _ in range(hparams.server_epochs):
            total, seen = torch.zeros((), dtype=torch.float64, device=device), 0
            order = torch.randperm(count, generator=generator).to(device)
            for minibatch in zip(*(each[order].split(batch) for each in vectors), strict=True):
                if (rows := len(minibatch[0])) >= fewest:
                    value = loss(*minibatch)
                    optimizer.zero_grad()
                    value.backward()
                    optimizer.step()
                    total, seen = total + value.detach().double() * rows, seen + rows
    finally:
        torch.set_num_threads(threads)
    return total.item() / max(1, seen)
