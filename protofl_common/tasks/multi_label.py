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
    LABEL_AUC_ERROR,
    LABEL_METRICS,
    LARGEST_SCORE,
    MACRO_F1,
    Labels,
    Scores,
    best_thresholds,
    evaluate_metrics,
    to_step,
)

if TYPE_CHECKING:
    from torch import Tensor

NONE_HOLDS = "none of them"


@dataclass(frozen=True)
class MultiLabel(Task):
    """Binary cross-entropy of L outputs, over the labels that are known."""

    kind = "multi-label"
    noun = "labels"
    says = "of every input it says which of them hold"
    metrics = LABEL_METRICS
    metrics_by_class = (LABEL_AUC, LABEL_AUC_ERROR)
    usual_metric = "auc"
    says_right = "exact match"
    result_metric = "auc"
    result_title = "AUC"

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
            names += [f"no {name}", name]  # classes 2 l and 2 l + 1
        return tuple(names)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.classes

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
        """Return the rarest label that each sample has, L for none, [N].

        Data are divided by these, so that every part gets samples of rare labels.
        """
        holds_NL = labels == 1
        counts_L = holds_NL.sum(0)
        counts_NL = np.where(holds_NL, counts_L, len(labels) + 1)  # others: above any count
        return np.where(holds_NL.any(1), counts_NL.argmin(1), len(self.classes))

    def are_uneven(self, labels: Labels) -> bool:
        """Return True: few samples have any one label, and all of them must be right at once."""
        return True

    # -- learning ----------------------------------------------------------------------------------
    def loss(self, outputs_BO: "Tensor", labels: "Tensor") -> "Tensor":
        """Return the mean binary cross-entropy over all known labels of the batch; 0 without any.

        ``outputs_BO`` are logits, one for each label: O = L.
        """
        from torch.nn.functional import binary_cross_entropy_with_logits

        is_known_BL = labels != UNLABELLED
        wanted_BL = labels.clamp(min=0).to(outputs_BO.dtype)
        losses_BL = binary_cross_entropy_with_logits(outputs_BO, wanted_BL, reduction="none")
        return (losses_BL * is_known_BL).sum() / is_known_BL.sum().clamp(min=1)

    # -- which prototypes a sample belongs to ------------------------------------------------------
    def assigned(self, vectors: "Tensor", labels: "Tensor") -> "tuple[Tensor, Tensor]":
        rows_M, labels_M = (labels != UNLABELLED).nonzero(as_tuple=True)
        values_M = labels[rows_M, labels_M]
        return vectors[rows_M], 2 * labels_M + values_M  # class 2 l + value

    def labels_of(self, classes_P: "Tensor") -> "Tensor":
        labels_PL = classes_P.new_full((len(classes_P), len(self.classes)), UNLABELLED)
        label_P1 = (classes_P // 2)[:, None]  # class 2 l + value
        value_P1 = (classes_P % 2)[:, None]
        return labels_PL.scatter_(1, label_P1, value_P1)

    def rivals(self, classes_M: "Tensor", classes_P: "Tensor") -> "Tensor":
        """Return which classes P are of the same label as each class M, [M, P].

        Another label is no rival: a sample may have both.
        """
        return classes_M[:, None] // 2 == classes_P // 2

    def combined(self, scores_NC: "Tensor") -> "Tensor":
        """Return for each label how much more its class "has it" scores than "has it not", [N, L].

        A class of which nothing is known scores −∞, so a difference may be infinite, or NaN where
        neither class is known. It becomes ± `LARGEST_SCORE`; negative for NaN: a label is not
        predicted where nothing is known of samples that have it.
        """
        with_label_NL = scores_NC[:, 1::2]  # classes 2 l + 1
        without_label_NL = scores_NC[:, ::2]  # classes 2 l
        scores_NL = with_label_NL - without_label_NL
        return scores_NL.nan_to_num(nan=-LARGEST_SCORE, posinf=LARGEST_SCORE, neginf=-LARGEST_SCORE)

    # -- prediction --------------------------------------------------------------------------------
    def predicted(self, scores_NO: "Tensor") -> "Tensor":
        return (scores_NO > 0).long()

    def nearest(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        return self.predicted(self.scores(distances_NP, classes_P))

    def correct(self, predicted: "Tensor", labels: "Tensor") -> "Tensor":
        """Return the number of samples of which every known label is predicted right; a scalar."""
        return ((predicted == labels) | (labels == UNLABELLED)).all(1).sum()

    def probabilities(self, scores_NO: "Tensor", predicted: "Tensor") -> "Tensor":
        """Return the probability of each prediction's least certain label, [N]."""
        likely_NL = scores_NO.sigmoid()
        return likely_NL.where(predicted == 1, 1 - likely_NL).amin(1)

    def of_each(self, scores_NO: "Tensor") -> list[dict[str, float | None]]:
        samples: list[dict[str, float | None]] = []
        known_NO = scores_NO.sigmoid().where(scores_NO.isfinite(), math.nan)
        for row in known_NO.tolist():
            values = [None if math.isnan(value) else value for value in row]
            samples.append(dict(zip(self.classes, values, strict=True)))
        return samples

    def temperature(self, scores_NO: "Tensor", labels: "Tensor") -> float:
        """Return the T that fits best, without unknown labels, and labels without prototypes."""
        is_used_NL = (scores_NO.abs() < LARGEST_SCORE) & (labels != UNLABELLED)
        labels_NL = labels.where(is_used_NL, UNLABELLED)  # `loss` leaves these out
        return self._best_temperature(scores_NO, labels_NL, scores_NO[is_used_NL])

    # -- what may leave ----------------------------------------------------------------------------
    def large_classes(self, labels: Labels, least: int) -> Labels:
        """Return, ascending, the classes that are large enough for statistics of them to leave.

        Both classes of a label are returned, or neither: samples without it, and with it.

        A label counts if it is known to hold for at least ``least`` samples, and known not to hold
        for at least as many. Of these labels the rarest are then left out, one by one, until sums
        over the classes show no fewer than ``least`` samples, however they are added and subtracted
        (`_hides_small_groups`).
        """
        smaller_L = np.minimum((labels == 1).sum(0), (labels == 0).sum(0))  # of a label's classes
        rarest_first = np.argsort(smaller_L, kind="stable").tolist()
        kept = [label for label in rarest_first if smaller_L[label] >= least]
        while kept and not _hides_small_groups(labels[:, kept], least):
            kept.pop(0)
        labels_K1 = np.array(sorted(kept), dtype=np.int64)[:, None]
        classes_K2: Labels = 2 * labels_K1 + np.arange(2)  # without the label, and with it
        return classes_K2.ravel()

    def present_classes(self, labels: Labels) -> Labels:
        """Return, ascending, the classes to which any of the samples belongs.

        Of a label that no sample has it is the class of samples without the label.
        """
        has_class_L2 = np.stack([(labels == 0).any(0), (labels == 1).any(0)], axis=1)
        return np.flatnonzero(has_class_L2)  # class 2 l + value

    def only_of(self, labels: Labels, classes: Labels) -> Labels:
        classes_NL = 2 * np.arange(len(self.classes)) + labels  # class 2 l + value
        is_kept_NL = (labels != UNLABELLED) & np.isin(classes_NL, classes)
        return np.where(is_kept_NL, labels, UNLABELLED)

    # -- metrics -----------------------------------------------------------------------------------
    def thresholds(self, scores_NO: Scores, labels: Labels) -> Scores | None:
        return best_thresholds(scores_NO, labels)

    def figures(
        self, names: Iterable[str], scores_NO: Scores, labels: Labels, least: int = 1
    ) -> dict[str, float]:
        """Compute the metrics of these names; with ``least`` above 1 none tells of fewer samples.

        Then only labels with enough test samples of both classes count (`large_classes`), and
        figures are rounded to steps that no fewer than ``least`` samples make. {} without such.
        Standard errors are smaller than these steps, and left out.
        """
        if least <= 1:
            return evaluate_metrics(names, self.metrics, scores_NO, labels)
        tested = self.only_of(labels, self.large_classes(labels, max(least, FEWEST_TESTED)))
        smaller_L = np.minimum((tested == 1).sum(0), (tested == 0).sum(0))  # of a label's classes
        if not smaller_L.any():
            return {}
        names = [name for name in names if name != LABEL_AUC_ERROR]
        exact = evaluate_metrics(names, self.metrics, scores_NO, tested)
        smallest = int(smaller_L[smaller_L > 0].min())
        rounded = {}
        for name, value in exact.items():
            # one sample moves a figure of the rarest label by 1 / its samples at most, an F1 by 2
            step = least * (2 if name == MACRO_F1 else 1) / smallest
            rounded[name] = to_step(value, step)
        return rounded


def _hides_small_groups(labels: Labels, least: int) -> bool:
    """Return whether no combination of sums over classes shows fewer than ``least`` samples.

    Samples with the same row of ``labels`` [N, L] form a group. A linear combination of the sums
    over the 2 L classes weighs all samples of a group alike, by the classes that they belong to. A
    combination shows small groups alone if its weight is 0 for every large group, and not for these
    small ones. There is none if the small groups' memberships lie in the span of the large groups':
    if both together have no higher rank than the large groups.
    """
    groups_GL, counts_G = np.unique(labels, axis=0, return_counts=True)
    belongs_G2L = np.concatenate([groups_GL == 0, groups_GL == 1], axis=1)
    memberships_G2L: NDArray[np.float64] = belongs_G2L * 1.0
    large = memberships_G2L[counts_G >= least]
    if not len(large):
        return False
    return bool(np.linalg.matrix_rank(large) == np.linalg.matrix_rank(memberships_G2L))
