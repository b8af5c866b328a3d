"""The server's side of a round, once for all algorithms: a Flower ``Strategy`` with small hooks.

    payload_down -> (clients) -> expected_up -> merge, and at the end prototypes and weights to keep

The base makes the messages, has every reply checked against what the catalog declares (`intake.py`), and merges the
valid ones. An algorithm's file holds only its own mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from protofl_common.catalog import Crossing
from protofl_common.messages import (
    Instructions,
    Limits,
    Payload,
    Weights,
    pack_instructions,
    pack_payload,
    payload_bytes,
    template_of,
)
from protofl_common.prototypes import Prototypes
from protofl_common.robust import merge_prototypes
from protofl_common.text import in_order
from server_app.federation import Federation
from server_app.intake import Expected, Outcome, Upload, in_proportion, take
from server_app.sampling import sample_sites
from server_app.strategies.keeping import packed, put_back


class ServerStrategy(Strategy):
    """Local: nothing goes down, nothing comes up. Algorithms override the hooks."""

    keeps: tuple[str, ...] = ()
    """The attributes that make up the server's state: what a round changes and the next one needs (`keeping.py`)."""

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

    def merged(self, uploads: list[Upload], weighting: str, previous: Prototypes | None) -> Prototypes | None:
        """For an algorithm that averages: the uploads' prototypes as one per class, by ``merging``.

        A class that nobody sent keeps that of ``previous``; so do all where no prototypes were due.
        """
        sets = [upload.payload.prototypes for upload in uploads if upload.payload.prototypes is not None]
        federation = self.settings.federation
        if not sets:
            return previous
        return merge_prototypes(sets, weighting, previous, federation.merging, federation.trim_fraction)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """What `keeps` names, as it is now."""
        return packed(self, self.keeps)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`; from an empty one, as before the first round."""
        if state:
            put_back(self, self.keeps, state)

    # -- Flower's interface --------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord | None, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to this round's sample of the sites: evaluate, train, upload."""
        federation = self.settings.federation
        sites = sample_sites(self.federation.node_of, federation.participation, self.settings.run.seed, server_round)
        evaluate = (server_round - 1) % federation.evaluate_every == 0
        instructions = Instructions(server_round, self.run_name, evaluate, self.federation.lineage)
        return self._messages(MessageType.TRAIN, instructions, sites)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and merge the valid ones; ``self.outcome`` tells how it went."""
        expected = Expected(server_round, self.expected_up(server_round), self.limits(), self.row.reported_losses)
        uploads = take(replies, expected, self.federation, self.outcome)
        uploads = in_proportion(uploads, self.settings.federation.max_norm_ratio, self.outcome)
        sent = {upload.site: upload.payload.prototypes for upload in uploads}
        self.outcome.uploads = {site: one for site, one in sent.items() if one is not None}
        self.outcome.void = len(uploads) < self.settings.federation.min_replies
        figures = {} if self.outcome.void else self.merge(uploads)
        return None, MetricRecord(figures)  # type: ignore[arg-type]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord | None, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to all sites: evaluate only."""
        sites = in_order(self.federation.node_of)
        instructions = Instructions(server_round, self.run_name, True, self.federation.lineage)
        return self._messages(MessageType.EVALUATE, instructions, sites)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Check the replies and collect their reports in ``self.outcome``."""
        told = Crossing(insight=self.settings.run.insight)
        expected = Expected(server_round, told, self.limits(), training=False)
        uploads = take(replies, expected, self.federation, self.outcome)
        insights = {upload.site: upload.payload.insight for upload in uploads}
        self.outcome.insights = {site: one for site, one in insights.items() if one is not None}
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
            backbones=len(self.settings.backbones),
        )

    def _messages(self, kind: str, instructions: Instructions, sites: list[str]) -> list[Message]:
        packed = pack_payload(self.payload_down(), self.row.down)
        self.outcome = Outcome(asked=sites, bytes_down=payload_bytes(packed) * len(sites))
        messages = []
        for site in sites:
            content = RecordDict({**packed, "round": pack_instructions(instructions)})
            messages.append(Message(content, self.federation.node_of[site], kind, group_id=str(instructions.round)))
        return messages
