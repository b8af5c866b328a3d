"""The passes without gradient: evaluation, and the features that prototypes are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from client_app.data import Samples
from protofl_common.maths.prototypes import Prototypes, class_scores, distances
from protofl_common.models.split import SplitModel
from protofl_common.privacy.release import tested_classes
from protofl_common.runs.evaluation_metrics import evaluate_metrics


@dataclass(frozen=True)
class Evaluation:
    """Figures of some of a client's samples, by way to predict: ``head`` (logits) and, given any, ``prototype``."""

    correct: dict[str, int] = field(default_factory=dict)  # Right predictions
    metrics: dict[str, float] = field(default_factory=dict)  # ``head/auc`` …, where asked for (`evaluation_metrics.py`)

    def accuracies(self, samples: int) -> dict[str, float]:
        return {kind: right / max(1, samples) for kind, right in self.correct.items()}


@torch.inference_mode()
def evaluate(
    model: SplitModel,
    data: Samples,
    batch_size: int,
    prototypes: Prototypes | None = None,
    similarity: str = "l2",
    with_head: bool = True,
    metrics: Sequence[str] = (),
    num_classes: int = 0,
    least: int = 1,
) -> Evaluation:
    """Predict by head and nearest prototype; `distances` explains ``similarity``, `tested_classes` ``least``."""
    model.eval()
    hits, scores = dict[str, Tensor](), dict[str, list[Tensor]]()
    for inputs, labels in zip(data.inputs.split(batch_size), data.labels.split(batch_size), strict=True):
        features = model.body(inputs)
        predicted = {}
        if with_head:
            logits = model.head(features)
            predicted["head"] = logits.argmax(1)
            if metrics:
                scores.setdefault("head", []).append(logits)
        if prototypes is not None and len(prototypes):
            distances_BP = distances(features, prototypes, similarity)
            predicted["prototype"] = prototypes.labels[distances_BP.argmin(dim=1)]
            if metrics:
                scores.setdefault("prototype", []).append(class_scores(distances_BP, prototypes.labels, num_classes))
        for name, labels_found in predicted.items():
            hits[name] = hits.get(name, 0) + (labels_found == labels).sum()
    correct = {name: int(count) for name, count in hits.items()}
    if not scores:
        return Evaluation(correct)
    labels_N = data.labels.cpu().numpy()
    rows_N = np.isin(labels_N, tested_classes(labels_N, least))
    figures = {
        f"{name}/{metric}": value
        for name, parts in scores.items()
        for metric, value in evaluate_metrics(metrics, _finite(torch.cat(parts))[rows_N], labels_N[rows_N]).items()
    }
    return Evaluation(correct, figures)


def _finite(scores_NC: Tensor) -> np.ndarray:
    scores = scores_NC.double().cpu().numpy()
    return np.where(np.isfinite(scores), scores, -1e30)  # the probability of a class without a prototype is 0


@torch.inference_mode()
def features_of(model: SplitModel, data: Samples, batch_size: int) -> Tensor:
    """The features [N, D] of all of ``data``, in its order, on the CPU."""
    model.eval()
    return torch.cat([model.body(inputs) for inputs in data.inputs.split(batch_size)]).cpu()
