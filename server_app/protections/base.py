"""The seam between the replies of a round and the algorithm that merges them."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Self

from server_app.run.replies import Upload
from server_app.strategies.base import Strategy


@dataclass(frozen=True)
class Accepted:
    """The uploads that may go on: at first all valid ones, then what each protection lets pass."""

    kept: list[Upload]
    refused: Mapping[str, str] = field(default_factory=dict)  # Site -> what is wrong with its reply
    reduced: Set[str] = frozenset()  # Lines "site: how its upload was reduced"
    why_void: str = ""  # Why the round must change nothing; "" where it may

    def then(self, protection: "Protection", strategy: Strategy) -> Self:
        """Return the result after one more protection, with all that was refused or reduced so far.

        In a round that is void already, the protection does not act.
        """
        if self.why_void:
            return self
        outcome = protection(self.kept, strategy)
        refused = {**self.refused, **outcome.refused}
        return type(self)(outcome.kept, refused, self.reduced | outcome.reduced, outcome.why_void)


Protection = Callable[[list[Upload], Strategy], Accepted]
"""A function that returns the uploads that may go on, perhaps reduced, and why others are refused.

It keeps nothing from one round to the next. Where the settings do not ask for it, all uploads go on
as they are.
"""
