"""The server's side of a round, once for all algorithms: a Flower ``Strategy`` with small hooks.

    payload_down -> (clients) -> expected_up -> merge, and at the end prototypes and weights to keep

The base makes the messages, checks every reply against what the catalog declares, counts what it refuses, and
collects the clients' reports. An algorithm's file holds only its own mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from protofl_common.catalog import Crossing
from protofl_common.messages import (
    Instructions,
    Limits,
    Payload,
    RefusedMessage,
    Report,
    Weights,
    pack_instructions,
    pack_payload,
    payload_bytes,
    template_of,
    unpack_payload,
    unpack_report,
)
from protofl_common.prototypes import Prototypes
from server_app.federation import Federation
from server_app.sampling import in_order, sample_sites


@dataclass(frozen=True)
class Upload:
    """What one client sent, checked."""

    site: str
    train_samples: int
    payload: Payload


@dataclass
class Outcome:
    """What came of one exchange."""

    asked: list[str] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Site -> why it could not do its work."""
    refused: dict[str, str] = field(default_factory=dict)
    """Site -> what was wrong with its reply."""
    prototypes: dict[str, list[int]] = field(default_factory=dict)
    """Site -> how many prototypes of each class it sent, where a class may have several."""
    bytes_down: int = 0
    bytes_up: int = 0
    void: bool = False
    """Too few valid replies: nothing was merged."""

    @property
    def missing(self) -> list[str]:
        """Sites that did not answer in time."""
        heard = self.reports.keys() | self.failed.keys() | self.refused.keys()
        return [site for site in self.asked if site not in heard]


class ServerStrategy(Strategy):
    """Local: nothing goes down, nothing comes up. Algorithms override the hooks."""

    def __init__(self, federation: Federation, run_name: str) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.algorithm = federation.settings.algorithm
        self.row = federation.settings.row
        self.run_name = run_name
        self.num_classes = len(next(iter(federation.cards.values())).classes)
        self.outcome = Outcome()

    # -- hooks of an algorithm -----------------------------------------------------------------------------------

    def payload_down(self) -> Payload:
        """What every client receives at the start of a round and at the final evaluation."""
        return Payload()

    def expected_up(self, server_round: int) -> Crossing:
        """What every reply of this round must hold: all that the catalog declares, unless an algorithm says less."""
        return self.row.up

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """The server's step on the round's valid uploads, in the order of the sites; figures to report."""
        return {}

    @property
    def global_prototypes(self) -> Prototypes | None:
        """The prototypes to keep with the results."""
        return None

    @property
    def global_weights(self) -> Weights | None:
        """The global model, where there is one."""
        return None

    # -- Flower's interface --------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord | None, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to this round's sample of the sites: evaluate, train, upload."""
        federation = self.settings.federation
        sites = sample_sites(self.federation.node_of, federation.participation, self.settings.run.seed, server_round)
        evaluate = (server_round - 1) % federation.evaluate_every == 0
        return self._messages(MessageType.TRAIN, Instructions(server_round, self.run_name, evaluate), sites)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and merge the valid ones; ``self.outcome`` tells how it went."""
        uploads = [upload for reply in replies if (upload := self._checked(reply, server_round, training=True))]
        self.outcome.void = len(uploads) < self.settings.federation.min_replies
        figures = {} if self.outcome.void else self.merge(uploads)
        return None, MetricRecord(figures)  # type: ignore[arg-type]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord | None, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to all sites: evaluate only."""
        sites = in_order(self.federation.node_of)
        return self._messages(MessageType.EVALUATE, Instructions(server_round, self.run_name, True), sites)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Check the replies and collect their reports in ``self.outcome``."""
        for reply in replies:
            self._checked(reply, server_round, training=False)
        return None

    def summary(self) -> None:
        """One line about the algorithm."""
        print(f"{self.row.title} ({self.row.paper})", flush=True)

    # -- inside --------------------------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """What is accepted from a client."""
        return Limits(
            num_classes=self.num_classes,
            feature_dim=self.settings.model.feature_dim,
            max_norm=self.settings.federation.max_prototype_norm,
            max_per_class=self.settings.federation.max_prototypes_per_class,
            weights=template_of(self.global_weights or {}),
        )

    def _messages(self, kind: str, instructions: Instructions, sites: list[str]) -> list[Message]:
        packed = pack_payload(self.payload_down(), self.row.down)
        self.outcome = Outcome(asked=sites, bytes_down=payload_bytes(packed) * len(sites))
        messages = []
        for site in sites:
            content = RecordDict({**packed, "round": pack_instructions(instructions)})
            messages.append(Message(content, self.federation.node_of[site], kind, group_id=str(instructions.round)))
        return messages

    def _checked(self, reply: Message, server_round: int, training: bool) -> Upload | None:
        """The upload of a valid reply; what is wrong with any other is noted in the outcome."""
        site = self.federation.site_of[reply.metadata.src_node_id]
        if reply.has_error():
            self.outcome.failed[site] = str(reply.error.reason)
            return None
        self.outcome.bytes_up += payload_bytes(reply.content)
        try:
            report = unpack_report(reply.content, server_round)
            crossing = self.expected_up(server_round) if training else Crossing()
            payload = unpack_payload(reply.content, crossing, self.limits(), required=training)
        except RefusedMessage as refusal:
            self.outcome.refused[site] = str(refusal)
            return None
        self.outcome.reports[site] = report
        if payload.prototypes is not None and crossing.many_per_class:
            labels = payload.prototypes.labels
            self.outcome.prototypes[site] = labels.bincount(minlength=self.num_classes).tolist()
        return Upload(site, report.train_samples, payload)
