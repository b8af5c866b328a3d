"""Tables of all training samples by class, which are made to be sent."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes, class_means

P = ParamSpec("P")
R = TypeVar("R")


class Tables:
    """Makes the tables of one message, here exact ones; `DifferentialPrivacy` adds its noise."""

    def class_means(self, features_ND: Tensor, labels_N: Tensor, num_classes: int) -> Prototypes:
        return class_means(features_ND, labels_N, num_classes)

    def class_counts(self, labels_N: Tensor, num_classes: int) -> Tensor:
        """[C] int64: the samples of each class."""
        return labels_N.bincount(minlength=num_classes)

    def measure(self, moments: ClassMoments, features_NF: Tensor, labels_N: Tensor) -> None:
        """Set ``moments`` to those of training samples."""
        moments.measure(features_NF, labels_N)

    def post_processed(self, function: Callable[P, R], *inputs: P.args, **named: P.kwargs) -> R:
        """Return ``function(*inputs)``, which may leave if its inputs may."""
        return function(*inputs, **named)
