"""The arrays that one message may carry under differential privacy.

An array is known by its content, not by a mark on an object. A mark would stay when somebody
changes the numbers in place, and get lost when a tensor moves to another device; and weights lie in
modules, which carry no marks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Literal, ParamSpec, TypeVar

from torch import Tensor, nn

from protofl_common.config.options import SettingsError
from protofl_common.maths.prototypes import Prototypes

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["table", "step", "evaluation"]  # what the ledger is charged for


class Released:
    """What a client has released for one message, and how much more its ledger was charged for.

    Three kinds of arrays are in it: those of the modules as they were before a sample was looked
    at, those that steps and tables with noise have made, and those that `post_processed` has made
    of such arrays. Numbers and texts among its inputs count as settings: they are trusted not to be
    made of samples.
    """

    def __init__(self, algo: str, dp: str) -> None:
        """Begin with nothing released and nothing charged; errors name ``algo`` and ``dp``."""
        self.algo = algo
        self.dp = dp
        # how many steps, tables and evaluations are charged to the ledger, and not yet made
        self.unused: Counter[Kind] = Counter()
        self._released_digests: set[bytes] = set()  # of the arrays that may leave

    def allow(self, kind: Kind, number: int) -> None:
        """Allow what the ledger has just been charged for."""
        self.unused[kind] += number

    def use(self, kind: Kind) -> None:
        """Use up one of the tables, steps or evaluations that were charged.

        SettingsError if none is left.
        """
        self.check(self.unused[kind] > 0)
        self.unused[kind] -= 1

    def add(self, value: object) -> None:
        """Let all arrays of a tensor, of prototypes, of a module, or of several of these leave."""
        self._released_digests.update(_digest(tensor) for tensor in _tensors_in(value))

    def covers(self, value: object) -> bool:
        """Return whether all arrays in ``value`` may leave, by their content."""
        return all(_digest(tensor) in self._released_digests for tensor in _tensors_in(value))

    def post_processed(self, function: Callable[P, R], *inputs: P.args, **named: P.kwargs) -> R:
        """Return ``function(*inputs)``, and let its arrays leave, as those of the inputs may.

        What is computed from private values alone is as private (Dwork and Roth, "The Algorithmic
        Foundations of Differential Privacy", 2014, Proposition 2.1). SettingsError for inputs that
        may not leave. TypeError for a method, a lambda, or a function within another: it could look
        at the samples as well.
        """
        if "." in function.__qualname__ or function.__name__ == "<lambda>":
            raise TypeError(
                f"{function.__qualname__} is no function of a module, so it may know more than its"
                " inputs"
            )
        self.check(self.covers([inputs, named]))
        result = function(*inputs, **named)
        self.add(result)
        return result

    def check(self, covered: bool) -> None:
        """Raise SettingsError unless the ledger covers what this client is about to do."""
        if not covered:
            raise SettingsError(
                f"dp = {self.dp!r}: {self.algo} makes use of training data that the privacy ledger"
                " does not cover"
            )

    def check_entries(self, entries: Mapping[str, object]) -> None:
        """Refuse an upload with an array that is not released: a SettingsError names its entry."""
        for name, value in entries.items():
            if not self.covers(value):
                raise SettingsError(
                    f"dp = {self.dp!r}: {self.algo} sends {name} that the privacy ledger does not"
                    " cover: neither private steps nor tables with noise have made them"
                )


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield all tensors in a value of any depth; TypeError for a type that may hold others."""
    match value:
        case Tensor():
            yield value
        case Prototypes():
            yield from _tensors_in([value.means, value.labels, value.counts])
        case nn.Module():
            yield from value.state_dict().values()
        case Mapping():
            yield from _tensors_in([*value.values()])
        case list() | tuple():
            for part in value:
                yield from _tensors_in(part)
        case None | str() | int() | float() | set() | frozenset():
            return  # names and settings say nothing of samples
        case _:
            raise TypeError(f"{type(value).__name__}: nobody knows here which arrays are in it")


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's type, shape and numbers, the same on every device."""
    values = tensor.detach().cpu().contiguous()
    header = f"{values.dtype} {tuple(values.shape)} "
    return sha256(header.encode() + values.numpy().tobytes()).digest()
