"""What a label is, and all that follows from it: everybody else asks the task.

Symbols: N samples, or B of a batch; P prototypes; C classes that prototypes are of; O outputs of a
head. A label is one entry of ``labels``, whatever its shape; a class is a whole number in [0, C).
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from protofl_common.tasks.metrics import KINDS, Labels, Metric, Scores

if TYPE_CHECKING:  # data are divided without PyTorch
    from torch import Tensor

UNLABELLED = -1  # a label that is not known


@dataclass(frozen=True)
class Result:
    """The figure that says how well a run predicts, by one way to predict."""

    name: str
    """As in a report: ``head``, or ``head/auc``."""
    title: str
    """What it is, for people: "accuracy", or "AUC"."""


@dataclass(frozen=True)
class Task(ABC):
    """What there is to learn; data, cards and models with the same ``classes`` have the same."""

    kind: ClassVar[str]
    """As the setting ``task`` names it."""
    noun: ClassVar[str]
    """What ``classes`` are, for people."""
    says: ClassVar[str]
    """What a model says of an input, for people."""
    metrics: ClassVar[Mapping[str, Metric]]
    """Metrics beside the share of right predictions, by name."""
    metrics_by_class: ClassVar[tuple[str, ...]]
    """Names that stand for one figure of each class, as ``recall`` for ``recall/3``."""
    usual_metric: ClassVar[str]
    """The one that simulated clients add where classes are uneven."""
    says_right: ClassVar[str] = "accuracy"
    """What the share of right predictions is called, for people."""
    result_metric: ClassVar[str] = ""
    """The metric that tells more than the share of right predictions; "" if none does."""
    result_title: ClassVar[str] = ""
    """What ``result_metric`` is called, for people."""

    classes: tuple[str, ...]
    """Names, in label order."""

    # -- what a label is ---------------------------------------------------------------------------
    @property
    @abstractmethod
    def num_classes(self) -> int:
        """C, the classes that a sample may belong to, and prototypes are of."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """O, what a head returns for a sample."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """C names."""
        return self.classes

    @property
    def output_names(self) -> tuple[str, ...]:
        """O names of a head's outputs in files: of a class its number, which is its label there."""
        return tuple(str(number) for number in range(self.num_outputs))

    @property
    def strata_names(self) -> tuple[str, ...]:
        """The names of the numbers that `strata` returns."""
        return self.classes

    @property
    def classes_of_a_sample(self) -> int:
        """How many classes a sample belongs to at most."""
        return 1

    def describe(self) -> str:
        """Say for people how much there is to tell apart: ``"10 classes"``."""
        return f"{len(self.classes)} {self.noun}"

    @abstractmethod
    def names(self, labels: "Tensor") -> list[str]:
        """Say each label in words."""

    def tensor(self, labels: Labels) -> "Tensor":
        """Return stored labels in the type that the methods below take."""
        import torch

        return torch.from_numpy(labels.astype(np.int64))

    @abstractmethod
    def known(self, labels: Any) -> Any:
        """Return a mask [N] of the samples of which something is known.

        ``labels`` may be an array or a tensor, and the mask is of the same kind.
        """

    @abstractmethod
    def strata(self, labels: Labels) -> Labels:
        """Return a stratum for each sample, whole numbers [N]; data are divided by these."""

    @abstractmethod
    def are_uneven(self, labels: Labels) -> bool:
        """Whether a share of right predictions says little: some classes are far more frequent."""

    # -- learning ----------------------------------------------------------------------------------
    @abstractmethod
    def loss(self, outputs_BO: "Tensor", labels: "Tensor") -> "Tensor":
        """Return the loss of a head, averaged over the batch; a scalar."""

    # -- which prototypes a sample belongs to ------------------------------------------------------
    @abstractmethod
    def assigned(self, vectors: "Tensor", labels: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return each sample's vector once for every class that it belongs to, and these classes.

        ``vectors`` [N, …] become [M, …], the classes are [M] int64.
        """

    @abstractmethod
    def labels_of(self, classes_P: "Tensor") -> "Tensor":
        """Return the label of a sample that belongs to this class, for each of ``classes_P``."""

    @abstractmethod
    def rivals(self, classes_M: "Tensor", classes_P: "Tensor") -> "Tensor":
        """Return which of the classes P a sample of a class M could be of in its place, [M, P].

        A contrast sets a sample apart from these alone; its own class is among them.
        """

    @abstractmethod
    def combined(self, scores_NC: "Tensor") -> "Tensor":
        """Return scores of a head's O outputs, [N, O], from scores of the C classes, [N, C].

        −∞ is the score of a class that nobody knows.
        """

    def classes_of(self, labels: "Tensor") -> "Tensor":
        """Return the classes of all samples [M], in the order of the samples."""
        _, classes_M = self.assigned(labels, labels)
        return classes_M

    def class_counts(self, labels: "Tensor") -> "Tensor":
        """Return how many samples belong to each class, [C] int64."""
        return self.classes_of(labels).bincount(minlength=self.num_classes)

    # -- prediction --------------------------------------------------------------------------------
    @abstractmethod
    def predicted(self, scores_NO: "Tensor") -> "Tensor":
        """Return the labels that a head's outputs, or scores, predict."""

    @abstractmethod
    def nearest(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        """Return the labels that the nearest prototypes predict (FedProto Eq. 2)."""

    @abstractmethod
    def correct(self, predicted: "Tensor", labels: "Tensor") -> "Tensor":
        """Return how many predictions are right; a scalar."""

    def scores(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        """Return scores [N, O] by the nearest prototypes, one for each of the O outputs of a head.

        Higher is likelier. They are `combined` from the classes' scores: −d² from the nearest
        prototype of a class, −∞ for a class without one.
        """
        from protofl_common.maths.prototypes import class_scores

        return self.combined(class_scores(distances_NP, classes_P, self.num_classes))

    @abstractmethod
    def probabilities(self, scores_NO: "Tensor", predicted: "Tensor") -> "Tensor":
        """Return how likely each prediction is, by these scores."""

    @abstractmethod
    def of_each(self, scores_NO: "Tensor") -> list[dict[str, float | None]]:
        """Return for each sample the probability of every label, by the label's name.

        It is None for an infinite score. The dictionaries are empty where a sample has one label.
        """

    @abstractmethod
    def temperature(self, scores_NO: "Tensor", labels: "Tensor") -> float:
        """Return the T for which the probabilities of scores / T fit the labels best.

        Scores are made of squared distances.
        """

    def _best_temperature(self, scores_NO: "Tensor", labels: "Tensor", used: "Tensor") -> float:
        """Return the T for which `loss` of scores / T is least, of 161 (Guo et al., ICML 2017).

        T lies within four powers of ten of the mean magnitude of the ``used`` scores, as their unit
        is arbitrary. It is 1 if there are none, or all are 0.
        """
        import torch

        mean_magnitude = float(used.abs().mean()) if len(used) else 0.0
        if mean_magnitude == 0:
            return 1.0
        factors = torch.logspace(-4, 4, 161)  # 20 for each power of ten
        losses = [self.loss(scores_NO / (mean_magnitude * t), labels) for t in factors]
        return mean_magnitude * float(factors[torch.stack(losses).argmin()])

    # -- what may leave ----------------------------------------------------------------------------
    @abstractmethod
    def large_classes(self, labels: Labels, least: int) -> Labels:
        """Return the classes with enough samples that what is made of them may leave the site.

        Whatever leaves must be made of ``least`` samples or more.
        """

    def present_classes(self, labels: Labels) -> Labels:
        """Return, ascending, the classes to which any of the samples belongs."""
        return self.large_classes(labels, 1)

    @abstractmethod
    def only_of(self, labels: Labels, classes: Labels) -> Labels:
        """Return the labels as if nothing were known but of these ``classes``."""

    # -- metrics -----------------------------------------------------------------------------------
    def thresholds(self, scores_NO: Scores, labels: Labels) -> Scores | None:
        """Return the threshold of each output, [O], that is best for these validation samples.

        An output is predicted if its score is above its threshold. The thresholds are subtracted
        from the scores of test samples before metrics are computed. None if there are none, as by
        default.
        """
        return None

    @abstractmethod
    def figures(
        self, names: Iterable[str], scores_NO: Scores, labels: Labels, least: int = 1
    ) -> dict[str, float]:
        """Compute the metrics of these names; those that are NaN or infinite are left out.

        With ``least`` above 1 the metrics are computed and rounded such that none tells anything of
        fewer test samples than that. SettingsError if a function of the user's fails.
        """

    @classmethod
    def metric_choices(cls) -> tuple[str, ...]:
        """Return the names that the setting ``metrics`` may have, but for functions."""
        return (*cls.metrics, *cls.metrics_by_class)

    @classmethod
    def result_of(cls, kind: str, measured: Container[str]) -> Result:
        """Return the figure that says how well a run predicts by ``kind``, one of `KINDS`.

        Everybody who shows a run's result asks here. It is the task's ``result_metric`` if that is
        among the ``measured`` metrics, such as ``head/auc``; else the share of right predictions.
        """
        name = f"{kind}/{cls.result_metric}"
        if cls.result_metric and name in measured:
            return Result(name, cls.result_title)
        return Result(kind, cls.says_right)

    def figure_names(self, names: Iterable[str]) -> set[str]:
        """Return all that a report may hold for these metrics: ``head/auc``, ``head/recall/3``."""
        metrics = []
        for name in names:
            if name in self.metrics_by_class:
                metrics += [f"{name}/{label}" for label in range(self.num_classes)]
            else:
                metrics.append(name)
        return {f"{kind}/{metric}" for kind in KINDS for metric in metrics}
