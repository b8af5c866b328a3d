"""The result of a round: `server_app/round.py` returns it, and the callbacks read it."""

from dataclasses import dataclass, field

from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy.sums import Means
from protofl_common.runs.folder import Seconds
from protofl_common.wire.payloads import ClientStatistics
from protofl_common.wire.records import Report


class VoidRound(Exception):
    """A round changes nothing; the text says why."""


@dataclass
class RoundResult:
    """The result of a round, or of the final evaluation."""

    number: int = 0  # The round; of the final evaluation, the last one
    final: bool = False
    asked: list[str] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # Site -> why it could not do its work
    refused: dict[str, str] = field(default_factory=dict)  # Site -> what was wrong with its reply
    prototypes: dict[str, Prototypes] = field(default_factory=dict)
    """Site -> its prototypes, of valid replies, in the order of the sites."""
    statistics: dict[str, ClientStatistics] = field(default_factory=dict)
    """Site -> what it told for the report, after the last round."""
    metrics: dict[str, float] = field(default_factory=dict)  # What the server's step reports
    means: Means | None = None
    """The figures over all sites' samples, where secure aggregation hides those of single sites."""
    epsilon: float | None = None  # What the run has cost of privacy by now; None where nothing is private
    seconds: Seconds = field(default_factory=Seconds)  # Of the exchange and of the server's step
    bytes_down: int = 0
    bytes_up: int = 0
    waited: float = 0.0  # Seconds of the exchange, for those that did not answer
    not_merged: str = ""  # Why nothing was merged; "" where it was
    bounded: set[str] = field(default_factory=set)  # ``"site: how its part in the aggregate was reduced"``
    late: dict[str, str] = field(default_factory=dict)
    """Site -> which reply to an earlier exchange came during this one; it is not used."""

    @property
    def missing(self) -> list[str]:
        heard = self.reports.keys() | self.failed.keys() | self.refused.keys()
        return [site for site in self.asked if site not in heard]
