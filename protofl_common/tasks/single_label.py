"""One label a sample: the class that it belongs to, int64 [N] in [0, C)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from protofl_common.tasks.base import UNLABELLED, Task
from protofl_common.tasks.metrics import (
    BALANCED,
    METRICS,
    METRICS_OF_TESTED,
    RECALL,
    Labels,
    Scores,
    evaluate_metrics,
    rounded_metrics,
    tested_classes,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SingleLabel(Task):
    """Cross-entropy of C outputs; the class of the largest one is predicted."""

    kind = "single-label"
    noun = "classes"
    says = "every input is given one of them"
    metrics = METRICS
    metrics_by_class = (RECALL,)
    usual_metric = BALANCED

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    def names(self, labels: "Tensor") -> list[str]:
        return [self.classes[label] for label in labels.tolist()]

    def known(self, labels: Any) -> Any:
        return labels != UNLABELLED

    def strata(self, labels: Labels) -> Labels:
        return labels

    def are_uneven(self, labels: Labels) -> bool:
        """A class has more than twice another's samples."""
        counts = np.unique(labels, return_counts=True)[1]
        return bool(counts.max() > 2 * counts.min())

    def loss(self, outputs_BO: "Tensor", labels: "Tensor") -> "Tensor":
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs_BO, labels)

    def assigned(self, vectors: "Tensor", labels: "Tensor") -> "tuple[Tensor, Tensor]":
        return vectors, labels

    def labels_of(self, classes_P: "Tensor") -> "Tensor":
        return classes_P

    def rivals(self, classes_M: "Tensor", classes_P: "Tensor") -> "Tensor":
        import torch

        shape = (len(classes_M), len(classes_P))
        return torch.ones(shape, dtype=torch.bool, device=classes_M.device)

    def combined(self, scores_NC: "Tensor") -> "Tensor":
        return scores_NC

    def predicted(self, scores_NO: "Tensor") -> "Tensor":
        return scores_NO.argmax(1)

    def nearest(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        return classes_P[distances_NP.argmin(1)]

    def correct(self, predicted: "Tensor", labels: "Tensor") -> "Tensor":
        return (predicted == labels).sum()

    def probabilities(self, scores_NO: "Tensor", predicted: "Tensor") -> "Tensor":
        return scores_NO.softmax(1).gather(1, predicted[:, None])[:, 0]

    def of_each(self, scores_NO: "Tensor") -> list[dict[str, float | None]]:
        return [{} for _ in scores_NO]

    def temperature(self, scores_NO: "Tensor", labels: "Tensor") -> float:
        """Return the T that fits best, without samples of a class that has no prototype."""
        has_prototype_N = scores_NO.gather(1, labels[:, None])[:, 0].isfinite()
        scores_NO = scores_NO[has_prototype_N]
        finite = scores_NO[scores_NO.isfinite()]
        return self._best_temperature(scores_NO, labels[has_prototype_N], finite)

    def large_classes(self, labels: Labels, least: int) -> Labels:
        classes, counts = np.unique(labels[labels != UNLABELLED], return_counts=True)
        return np.asarray(classes[counts >= least])

    def only_of(self, labels: Labels, classes: Labels) -> Labels:
        return np.where(np.isin(labels, classes), labels, UNLABELLED)

    def figures(
        self, names: Iterable[str], scores_NO: Scores, labels: Labels, least: int = 1
    ) -> dict[str, float]:
        is_tested_N = np.isin(labels, tested_classes(labels, least))
        labels_N = labels[is_tested_N]
        metrics = self.metrics if least <= 1 else METRICS_OF_TESTED
        exact = evaluate_metrics(names, metrics, scores_NO[is_tested_N], labels_N)
        return rounded_metrics(exact, labels_N, least)
