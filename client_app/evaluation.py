"""The passes without gradient: evaluation, and the features that prototypes are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from client_app.data import Samples
from protofl_common.models.split import SplitModel
from protofl_common.prototypes import Prototypes, nearest_label


@torch.inference_mode()
def evaluate(
    model: SplitModel,
    data: Samples,
    batch_size: int,
    prototypes: Prototypes | None = None,
    similarity: str = "l2",
    with_head: bool = True,
) -> dict[str, int]:
    """Correct predictions on ``data``: ``head`` (argmax of the logits) and, given prototypes, ``prototype``.

    ``similarity``: how prototypes are compared with, see `nearest_label`.
    """
    model.eval()
    hits: dict[str, Tensor] = {}
    for inputs, labels in zip(data.inputs.split(batch_size), data.labels.split(batch_size), strict=True):
        features = model.body(inputs)
        predictions = {"head": model.head(features).argmax(1)} if with_head else {}
        if prototypes is not None and len(prototypes):
            predictions["prototype"] = nearest_label(features, prototypes, similarity)
        for name, predicted in predictions.items():
            hits[name] = hits.get(name, 0) + (predicted == labels).sum()
    return {name: int(count) for name, count in hits.items()}


@torch.inference_mode()
def local_features(model: SplitModel, data: Samples, batch_size: int) -> Tensor:
    """The features [N, D] of all of ``data``, in its order, on the CPU."""
    model.eval()
    return torch.cat([model.body(inputs) for inputs in data.inputs.split(batch_size)]).cpu()
