"""How an algorithm uses training samples for its upload: freely, unless a protection counts it."""

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from torch import Tensor, nn

from client_app.learning.training import Step
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes, class_means
from protofl_common.wire.payloads import Payload

P = ParamSpec("P")
R = TypeVar("R")


class SampleUse:
    """The trainings and tables of one message, in calling order; here none is refused or changed.

    A table is made of all training samples, by class, to be sent. Under ``dp`` the protection
    `DifferentialPrivacy` stands in its place.
    """

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Take note of the half's modules as they are after the server's payload was received."""

    def begin_training(self, step: Step, as_charged: bool) -> None:
        """Take note of a training that begins.

        ``as_charged`` is True if its epochs, batches and samples are those of the settings.
        """

    def class_means(self, features_ND: Tensor, labels_N: Tensor, num_classes: int) -> Prototypes:
        return class_means(features_ND, labels_N, num_classes)

    def class_counts(self, labels_N: Tensor, num_classes: int) -> Tensor:
        """[C] int64: the samples of each class."""
        return labels_N.bincount(minlength=num_classes)

    def measure(
        self,
        moments: ClassMoments,
        features_MF: Tensor,
        classes_M: Tensor,
        samples: int | None = None,
    ) -> None:
        """Set ``moments`` to those of the samples, as `ClassMoments.measure` does."""
        moments.measure(features_MF, classes_M, samples)

    def post_processed(self, function: Callable[P, R], *inputs: P.args, **named: P.kwargs) -> R:
        """Return ``function(*inputs)``, which may leave if its inputs may."""
        return function(*inputs, **named)

    def check_answer(self, modules: Iterable[nn.Module], upload: Payload) -> None:
        """Check the modules after a round's work, and the upload; here everything passes."""
