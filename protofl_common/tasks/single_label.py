"""One label a sample: the class that it belongs to, int64 [N] in [0, C)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protofl_common.tasks.base import Task
from protofl_common.tasks.metrics import Labels, Scores, declared_metrics, evaluate_metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SingleLabel(Task):
    """Cross-entropy of C outputs; the class of the largest one is predicted."""

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    def describe(self) -> str:
        return f"{len(self.classes)} classes"

    def names(self, labels: "Tensor") -> list[str]:
        return [self.classes[label] for label in labels.tolist()]

    def tensor(self, labels: Labels) -> "Tensor":
        import torch

        return torch.from_numpy(labels.astype(np.int64))

    def strata(self, labels: Labels) -> Labels:
        return labels

    def loss(self, outputs_BO: "Tensor", labels: "Tensor") -> "Tensor":
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs_BO, labels)

    def assigned(self, vectors: "Tensor", labels: "Tensor") -> "tuple[Tensor, Tensor]":
        return vectors, labels

    def labels_of(self, classes_P: "Tensor") -> "Tensor":
        return classes_P

    def predicted(self, scores_NO: "Tensor") -> "Tensor":
        return scores_NO.argmax(1)

    def nearest(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        return classes_P[distances_NP.argmin(1)]

    def correct(self, predicted: "Tensor", labels: "Tensor") -> "Tensor":
        return (predicted == labels).sum()

    def scores(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        """Return −d² from the nearest prototype of each class; −∞ for a class without one."""
        from protofl_common.maths.prototypes import class_scores

        return class_scores(distances_NP, classes_P, self.num_classes)

    def probabilities(self, scores_NO: "Tensor", predicted: "Tensor") -> "Tensor":
        return scores_NO.softmax(1).gather(1, predicted[:, None])[:, 0]

    def temperature(self, scores_NO: "Tensor", labels: "Tensor") -> float:
        """Return the T of the least cross-entropy, of 161 tried (Guo et al., ICML 2017).

        Scores are −d². T lies around their mean, within four powers of ten. It is 1 if no sample's
        class has a prototype, or all distances are 0.
        """
        import torch

        has_prototype_N = scores_NO.gather(1, labels[:, None])[:, 0].isfinite()
        scores_NO = scores_NO[has_prototype_N]
        labels = labels[has_prototype_N]
        if not len(scores_NO):
            return 1.0
        mean_squared_distance = float(-scores_NO[scores_NO.isfinite()].mean())
        if mean_squared_distance <= 0:
            return 1.0
        factors = torch.logspace(-4, 4, 161)
        losses = [self.loss(scores_NO / (mean_squared_distance * t), labels) for t in factors]
        return mean_squared_distance * float(factors[torch.stack(losses).argmin()])

    def figures(self, names: Iterable[str], scores_NO: Scores, labels: Labels) -> dict[str, float]:
        return evaluate_metrics(names, scores_NO, labels)

    def figure_names(self, names: Iterable[str]) -> set[str]:
        return declared_metrics(names, self.num_classes)
