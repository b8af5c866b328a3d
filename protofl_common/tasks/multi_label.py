"""Several labels a sample: each holds (1), does not (0), or is not known (-1); int64 [N, L].

A label has two classes, and so two prototypes: 2 l of the samples without label l, 2 l + 1 of those
with it (FedMLP, Sun et al., MICCAI 2024). A sample belongs to one of the two for each label that
is known.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.sections import FEWEST_TESTED
from protofl_common.tasks.base import UNLABELLED, Task
from protofl_common.tasks.metrics import (
    LABEL_AUC,
    LABEL_METRICS,
    Labels,
    Scores,
    evaluate_metrics,
)

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_SCORE = 1e30  # of a label of which one class is not known
NONE_HOLDS = "none of them"


@dataclass(frozen=True)
class MultiLabel(Task):
    """Binary cross-entropy of L outputs, over the labels that are known."""

    kind = "multi-label"
    noun = "labels"
    says = "of every input it says which of them hold"
    metrics = LABEL_METRICS
    metrics_by_class = (LABEL_AUC,)
    usual_metric = "auc"

    @property
    def num_classes(self) -> int:
        return 2 * len(self.classes)

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        names: list[str] = []
        for name in self.classes:
            names += [f"no {name}", name]
        return tuple(names)

    @property
    def strata_names(self) -> tuple[str, ...]:
        return (*self.classes, NONE_HOLDS)

    @property
    def classes_of_a_sample(self) -> int:
        return len(self.classes)

    def names(self, labels: "Tensor") -> list[str]:
        texts = []
        for row in labels.tolist():
            held = [name for name, value in zip(self.classes, row, strict=True) if value == 1]
            texts.append(", ".join(held) or NONE_HOLDS)
        return texts

    def known(self, labels: Any) -> Any:
        return (labels != UNLABELLED).any(1)

    def strata(self, labels: Labels) -> Labels:
        """Return the rarest label that each sample has, L for none: so each part gets rare ones."""
        holds_NL = labels == 1
        rarity_NL = np.where(holds_NL, holds_NL.sum(0), len(labels) + 1)
        return np.where(holds_NL.any(1), rarity_NL.argmin(1), len(self.classes))

    def are_uneven(self, labels: Labels) -> bool:
        """Always: few samples have a label, and a prediction is right if all labels are."""
        return True

    # -- learning ----------------------------------------------------------------------------------
    def loss(self, outputs_BO: "Tensor", labels: "Tensor") -> "Tensor":
        from torch.nn.functional import binary_cross_entropy_with_logits

        is_known_BL = labels != UNLABELLED
        wanted_BL = labels.clamp(min=0).to(outputs_BO.dtype)
        losses_BL = binary_cross_entropy_with_logits(outputs_BO, wanted_BL, reduction="none")
        return (losses_BL * is_known_BL).sum() / is_known_BL.sum().clamp(min=1)

    # -- which prototypes a sample belongs to ------------------------------------------------------
    def assigned(self, vectors: "Tensor", labels: "Tensor") -> "tuple[Tensor, Tensor]":
        rows_M, labels_M = (labels != UNLABELLED).nonzero(as_tuple=True)
        return vectors[rows_M], 2 * labels_M + labels[rows_M, labels_M]

    def labels_of(self, classes_P: "Tensor") -> "Tensor":
        labels_PL = classes_P.new_full((len(classes_P), len(self.classes)), UNLABELLED)
        return labels_PL.scatter_(1, (classes_P // 2)[:, None], (classes_P % 2)[:, None])

    def rivals(self, classes_M: "Tensor", classes_P: "Tensor") -> "Tensor":
        """The two classes of the same label; a sample may have another label as well."""
        return classes_M[:, None] // 2 == classes_P // 2

    def combined(self, scores_NC: "Tensor") -> "Tensor":
        """Score of the class of samples with each label − score of that of samples without it.

        A label is not predicted where nothing is known of samples that have it.
        """
        scores_NL = scores_NC[:, 1::2] - scores_NC[:, ::2]
        return scores_NL.nan_to_num(-LARGEST_SCORE, LARGEST_SCORE, -LARGEST_SCORE)

    # -- prediction --------------------------------------------------------------------------------
    def predicted(self, scores_NO: "Tensor") -> "Tensor":
        return (scores_NO > 0).long()

    def nearest(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        return self.predicted(self.scores(distances_NP, classes_P))

    def correct(self, predicted: "Tensor", labels: "Tensor") -> "Tensor":
        """Return of how many samples all known labels are right."""
        return ((predicted == labels) | (labels == UNLABELLED)).all(1).sum()

    def probabilities(self, scores_NO: "Tensor", predicted: "Tensor") -> "Tensor":
        """Return how likely the least certain label of each prediction is."""
        likely_NL = scores_NO.sigmoid()
        return likely_NL.where(predicted == 1, 1 - likely_NL).amin(1)

    def of_each(self, scores_NO: "Tensor") -> list[dict[str, float]]:
        rows = scores_NO.sigmoid().tolist()
        return [dict(zip(self.classes, row, strict=True)) for row in rows]

    def temperature(self, scores_NO: "Tensor", labels: "Tensor") -> float:
        """Search for T, as for a single label; scores of labels without prototypes do not count."""
        import torch

        usable_NL = (scores_NO.abs() < LARGEST_SCORE) & (labels != UNLABELLED)
        if not bool(usable_NL.any()):
            return 1.0
        scale = float(scores_NO[usable_NL].abs().mean())
        if scale <= 0:
            return 1.0
        counted = labels.where(usable_NL, UNLABELLED)
        choices = torch.logspace(-4, 4, 161)
        losses = [self.loss(scores_NO / (scale * t), counted) for t in choices]
        return scale * float(choices[torch.stack(losses).argmin()])

    # -- what may leave ----------------------------------------------------------------------------
    def large_classes(self, labels: Labels, least: int) -> Labels:
        """Return both classes of the labels of which something may leave, in ascending order.

        Each has ``least`` samples with and without the label. And however sums of these classes are
        added and subtracted, what is left is nothing, or of ``least`` samples: samples of which
        the same labels are known, and hold, form a group, and the groups of fewer must not differ
        from combinations of the others. Labels go, the rarest first, until that is so.
        """
        counts_L = np.minimum((labels == 1).sum(0), (labels == 0).sum(0))
        rarest_first = [int(label) for label in np.argsort(counts_L, kind="stable")]
        kept = [label for label in rarest_first if counts_L[label] >= least]
        while kept and not _hides_small_groups(labels[:, kept], least):
            kept.pop(0)
        classes = [2 * label + side for label in sorted(kept) for side in (0, 1)]
        return np.array(classes, dtype=np.int64)

    def only_of(self, labels: Labels, classes: Labels) -> Labels:
        belongs_to_NL = np.where(labels == UNLABELLED, UNLABELLED, self._classes(labels))
        return np.where(np.isin(belongs_to_NL, classes), labels, UNLABELLED)

    def _classes(self, labels: Labels) -> Labels:
        return 2 * np.arange(len(self.classes)) + labels

    # -- metrics -----------------------------------------------------------------------------------
    def figures(
        self, names: Iterable[str], scores_NO: Scores, labels: Labels, least: int = 1
    ) -> dict[str, float]:
        if least <= 1:
            return evaluate_metrics(names, self.metrics, scores_NO, labels)
        tested = self.only_of(labels, self.large_classes(labels, max(least, FEWEST_TESTED)))
        counts_L = np.minimum((tested == 1).sum(0), (tested == 0).sum(0))
        if not counts_L.any():
            return {}
        exact = evaluate_metrics(names, self.metrics, scores_NO, tested)
        smallest = int(counts_L[counts_L > 0].min())
        step = least / smallest  # a sample moves a figure of the rarest label by 1 / its samples
        rounded = {}
        for name, value in exact.items():
            nearest = step * round(value / step)
            rounded[name] = min(1.0, nearest) if value <= 1 else nearest
        return rounded


def _hides_small_groups(labels: Labels, least: int) -> bool:
    """Whether sums over classes, combined at will, leave no group of fewer than ``least`` samples.

    A combination weighs a sample by what is known of its labels. One that is 0 for every group of
    ``least`` samples is 0 for the smaller ones if these lie in the span of the larger.
    """
    groups, counts = np.unique(labels, axis=0, return_counts=True)
    memberships: NDArray[np.float64] = np.concatenate([groups == 0, groups == 1], axis=1) * 1.0
    large = memberships[counts >= least]
    if not len(large):
        return False
    ranks = np.linalg.matrix_rank(large), np.linalg.matrix_rank(memberships)
    return math.isclose(*ranks)
