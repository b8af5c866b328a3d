"""What a label is, and all that follows from it: everybody else asks the task.

Symbols: N samples, or B of a batch; P prototypes; C classes that prototypes are of; O outputs of a
head. A label is one entry of ``labels``, whatever its shape; a class is a whole number in [0, C).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protofl_common.tasks.metrics import Labels, Scores

if TYPE_CHECKING:  # data are divided without PyTorch
    from torch import Tensor


@dataclass(frozen=True)
class Task(ABC):
    """What there is to learn; data, cards and models with the same ``classes`` have the same."""

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

    @abstractmethod
    def describe(self) -> str:
        """Say for people how much there is to tell apart: ``"10 classes"``."""

    @abstractmethod
    def names(self, labels: "Tensor") -> list[str]:
        """Say each label in words."""

    @abstractmethod
    def tensor(self, labels: Labels) -> "Tensor":
        """Return stored labels in the type and shape that the methods below take."""

    @abstractmethod
    def strata(self, labels: Labels) -> Labels:
        """Return a stratum for each sample, whole numbers [N]; data are divided by these."""

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

    @abstractmethod
    def scores(self, distances_NP: "Tensor", classes_P: "Tensor") -> "Tensor":
        """Return scores [N, O] by the nearest prototypes; higher is likelier."""

    @abstractmethod
    def probabilities(self, scores_NO: "Tensor", predicted: "Tensor") -> "Tensor":
        """Return how likely each prediction is, by these scores."""

    @abstractmethod
    def temperature(self, scores_NO: "Tensor", labels: "Tensor") -> float:
        """Return the T for which the probabilities of scores / T fit the labels best."""

    # -- metrics -----------------------------------------------------------------------------------
    @abstractmethod
    def figures(self, names: Iterable[str], scores_NO: Scores, labels: Labels) -> dict[str, float]:
        """Compute the metrics of these names; those that are NaN or infinite are left out.

        SettingsError if a function of the user's fails.
        """

    @abstractmethod
    def figure_names(self, names: Iterable[str]) -> set[str]:
        """Return all that a report may hold for these metrics: ``head/auc``, ``head/recall/3``."""
