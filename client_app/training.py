"""THE training loop: every algorithm trains through it, and gives it only a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from client_app.data import Samples
from client_app.eager import without_compiler
from protofl_common.models.fused_linear import fused_linears
from protofl_common.models.split import SplitModel
from protofl_common.settings import TrainingSettings

LossTerms = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], LossTerms]
"""(features [B, D], logits [B, C], labels [B]) -> named scalar terms; their sum is minimised, if there are any."""


class TrainingError(RuntimeError):
    """Training broke down; the message says where and what to try."""


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """The optimizer of the settings, over the parameters that train."""
    without_compiler()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def train(
    model: SplitModel,
    optimizer: torch.optim.Optimizer,
    data: Samples,
    loss: Loss,
    settings: TrainingSettings,
    seed: int,
) -> dict[str, float]:
    """Train ``model`` in place for ``local-epochs`` epochs.

    Wide layers take their SGD step inside the backward pass: the same step, faster, for losses that depend on the
    weights only through the layers' outputs (any other is a RuntimeError). Returns the mean over all samples seen of
    each loss term and of their ``total``. Raises TrainingError if the loss or a weight stops being finite.
    """
    torch.manual_seed(seed)  # dropout
    generator = torch.Generator().manual_seed(seed)
    joined = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    sums: dict[str, Tensor] = {}
    seen = 0
    model.train()
    with fused_linears(model, optimizer):
        for epoch in range(settings.local_epochs):
            for images, labels in shuffled_batches(
                data, settings.batch_size, generator, no_single=joined, drop_last=settings.drop_last
            ):
                seen += len(labels)
                features = model.body(images)
                terms = loss(features, model.head(features), labels)
                if not terms:
                    continue  # nothing to learn from yet; batch normalisation has seen the batch all the same
                total = torch.stack(list(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
                optimizer.zero_grad(set_to_none=True)
                total.backward()
                optimizer.step()
                for name, value in {**terms, "total": total}.items():
                    weighted = value.detach() * len(labels)
                    sums[name] = sums[name] + weighted if name in sums else weighted
            if sums and not torch.isfinite(sums["total"]):
                raise TrainingError(f"the loss is no longer finite in local epoch {epoch + 1}; try a smaller lr")
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise TrainingError(f"{name} is no longer finite after training; try a smaller lr")
    return {name: value.item() / seen for name, value in sums.items()}


def shuffled_batches(
    data: Samples,
    batch_size: int,
    generator: torch.Generator,
    *,
    no_single: bool = False,
    drop_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch: the data in a new random order, cut into batches; the last may be smaller.

    ``drop_last`` leaves out a smaller last batch, unless it is the only one. ``no_single`` joins a last batch of one
    sample to the one before it: batch normalisation cannot use it alone.
    """
    sizes = [batch_size] * (len(data) // batch_size)
    rest = len(data) % batch_size
    if rest and not (drop_last and sizes):
        if rest == 1 and no_single and sizes:
            sizes[-1] += 1
        else:
            sizes.append(rest)
    order = torch.randperm(len(data), generator=generator).to(data.labels.device)[: sum(sizes)]
    images, labels = data.inputs[order], data.labels[order]
    yield from zip(images.split(sizes), labels.split(sizes), strict=True)
