"""Passes over samples without gradients: evaluation, and the features for prototypes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from client_app.learning.data import Samples
from protofl_common.maths.prototypes import Prototypes, distances
from protofl_common.models.split import SplitModel
from protofl_common.tasks import Task
from protofl_common.tasks.metrics import LARGEST_SCORE


@dataclass(frozen=True)
class Evaluation:
    """Figures on some of a client's samples, for each kind of prediction.

    The kinds are ``head`` (by logits) and ``prototype`` (by the nearest one).
    """

    correct: dict[str, int] = field(default_factory=dict)  # Right predictions
    metrics: dict[str, float] = field(default_factory=dict)
    """``head/auc`` …, where asked for (`tasks/metrics.py`)."""
    thresholds: dict[str, np.ndarray] = field(default_factory=dict)
    """By kind, above which scores to predict as is best for these samples (`Task.thresholds`).

    {} of test samples: no figure may depend on thresholds that its own samples have chosen.
    """

    def accuracies(self, samples: int) -> dict[str, float]:
        return {kind: right / max(1, samples) for kind, right in self.correct.items()}


@torch.inference_mode()
def evaluate(
    model: SplitModel,
    data: Samples,
    batch_size: int,
    task: Task,
    prototypes: Prototypes | None = None,
    similarity: str = "l2",
    with_head: bool = True,
    metrics: Sequence[str] = (),
    least: int = 1,
    thresholds: Mapping[str, np.ndarray] | None = None,
) -> Evaluation:
    """Predict by the head and by the nearest prototype, and return the figures of both.

    Without prototypes, or ``with_head`` False, there is only the other kind. ``similarity`` is "l2"
    or "cosine" (`distances`). The ``metrics`` (names) are of classes with at least ``least``
    samples, and rounded to multiples of what so many samples weigh (`Task.figures`); the numbers of
    right predictions are exact. ``thresholds`` are those of validation samples, for the metrics of
    test samples if these are not rounded; None for the validation samples themselves, which choose
    them.
    """
    model.eval()
    hits: dict[str, Tensor] = {}
    scores: dict[str, list[Tensor]] = {}  # of all batches, where metrics are asked for
    batches = zip(data.inputs.split(batch_size), data.labels.split(batch_size), strict=True)
    for inputs, labels_B in batches:
        features_BD = model.body(inputs)
        predicted: dict[str, Tensor] = {}
        if with_head:
            logits_BC = model.head(features_BD)
            predicted["head"] = task.predicted(logits_BC)
            if metrics:
                scores.setdefault("head", []).append(logits_BC)
        if prototypes is not None and len(prototypes):
            distances_BP = distances(features_BD, prototypes, similarity)
            predicted["prototype"] = task.nearest(distances_BP, prototypes.labels)
            if metrics:
                scores_BC = task.scores(distances_BP, prototypes.labels)
                scores.setdefault("prototype", []).append(scores_BC)
        for name, predicted_B in predicted.items():
            hits[name] = hits.get(name, 0) + task.correct(predicted_B, labels_B)

    correct = {name: int(count) for name, count in hits.items()}
    if not scores:
        return Evaluation(correct)

    labels_N = data.labels.cpu().numpy()
    figures: dict[str, float] = {}
    best_thresholds: dict[str, np.ndarray] = {}
    for name, parts in scores.items():
        scores_NC = _finite(torch.cat(parts))
        if thresholds is None:
            best = task.thresholds(scores_NC, labels_N)
            if best is not None:
                best_thresholds[name] = best
        # one validation sample may move a threshold past many test samples: no rounding covers that
        elif name in thresholds and least <= 1:
            scores_NC = scores_NC - thresholds[name]
        for metric, value in task.figures(metrics, scores_NC, labels_N, least).items():
            figures[f"{name}/{metric}"] = value
    return Evaluation(correct, figures, best_thresholds)


def _finite(scores_NC: Tensor) -> np.ndarray:
    """Return the scores with −`LARGEST_SCORE` where they are not finite, for a softmax to be taken.

    A class without a prototype has the score −∞, and so the probability 0 afterwards.
    """
    scores = scores_NC.double().cpu().numpy()
    return np.where(np.isfinite(scores), scores, -LARGEST_SCORE)


@torch.inference_mode()
def features_of(model: SplitModel, data: Samples, batch_size: int) -> Tensor:
    """Return the features [N, D] of all samples, in their order, on the CPU."""
    model.eval()
    parts = [model.body(inputs) for inputs in data.inputs.split(batch_size)]
    return torch.cat(parts).cpu()
