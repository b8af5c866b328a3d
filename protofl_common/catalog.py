"""The catalog: one row per algorithm. Its keys are the legal values of ``algo``.

A row says what crosses the wire, and the wire code (`messages`) enforces it in both directions: nothing that a
row does not declare can be packed or is accepted. The server half of an algorithm stands in
``server_app/strategies``, the client half in ``client_app/algorithms``, under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofl_common.options import option

DISTANCES = ("l2", "squared-l2", "l1", "mse")
GRANULARITIES = ("class", "class-mean", "sample")
"""How `losses.prototype_alignment` may measure; one choice for every algorithm that uses it."""

CLUSTERINGS = ("finch", "kmeans", "average")
"""How `clustering.cluster` makes prototypes of a class's vectors: clusters by FINCH or by k-means, or one mean."""


MERGINGS = ("mean", "median", "trimmed-mean")
"""How a server that averages the clients' prototypes may do it (`robust.py`)."""


@dataclass(frozen=True)
class Crossing:
    """What one direction of an exchange carries."""

    prototypes: bool = False
    """Class prototypes: means [P, D] and labels [P]."""
    counts: bool = False
    """Samples behind each prototype, [P]. Some papers promise not to reveal them."""
    weights: bool = False
    """The whole model."""
    many_per_class: bool = False
    """A class may have several prototypes."""
    local_sets: bool = False
    """The prototypes of every client, one set each."""
    insight: str = "none"
    """What a client tells for the report, after the last round only (`insight.LEVELS`)."""


@dataclass(frozen=True)
class NoSettings:
    """For an algorithm without settings of its own."""


@dataclass(frozen=True)
class FedProtoSettings:
    """``[tool.flwr.app.config.fedproto]``."""

    lambda_: float = option(minimum=0)
    weighting: str = option(choices=("counts", "uniform"))
    distance: str = option(choices=DISTANCES)
    granularity: str = option(choices=GRANULARITIES)


@dataclass(frozen=True)
class FedTGPSettings:
    """``[tool.flwr.app.config.fedtgp]``."""

    lambda_: float = option(minimum=0)
    distance: str = option(choices=DISTANCES)
    granularity: str = option(choices=GRANULARITIES)
    margin: str = option(choices=("adaptive", "nearest", "fixed", "none"))
    margin_threshold: float = option(minimum=0)
    transform: bool = option()
    server_epochs: int = option(minimum=1)
    server_lr: float = option(above=0)
    server_batch_size: int = option(minimum=0)


@dataclass(frozen=True)
class ProtoFedSettings:
    """``[tool.flwr.app.config.protofed]``."""

    prototypes: str = option(choices=("last-round", "every-round"))

    def due(self, server_round: int, rounds: int) -> bool:
        """Whether clients send prototypes in this round of ``rounds``; both halves ask here."""
        return server_round == rounds or self.prototypes == "every-round"


@dataclass(frozen=True)
class FedPCLSettings:
    """``[tool.flwr.app.config.fedpcl]``."""

    temperature: float = option(above=0)
    prototypes: str = option(choices=("both", "global", "local"))
    loss: str = option(choices=("contrast", "supcon", "ce-protodist", "ce"))
    denominator: str = option(choices=("others", "all"))


@dataclass(frozen=True)
class FedPLVMSettings:
    """``[tool.flwr.app.config.fedplvm]``."""

    lambda_: float = option(minimum=0)
    alpha: float = option(above=0, maximum=1)
    temperature: float = option(above=0)
    contrast: bool = option()
    correction: bool = option()
    similarity_floor: float = option(above=0, maximum=1)
    local_clusters: str = option(choices=CLUSTERINGS)
    global_clusters: str = option(choices=(*CLUSTERINGS, "none"))
    kmeans_clusters: int = option(minimum=0)


@dataclass(frozen=True)
class Algorithm:
    """One row."""

    title: str
    paper: str
    settings: type
    down: Crossing
    up: Crossing
    losses: tuple[str, ...] = ("cross-entropy",)
    """Names of the loss terms that its clients report."""
    averages_prototypes: bool = False
    """The server takes a mean over the clients' prototypes of a class, so that ``merging`` may replace it."""
    frozen_backbones: bool = False
    """Made for features of frozen backbones: they are used unless the settings say otherwise."""

    @property
    def reported_losses(self) -> tuple[str, ...]:
        """All loss names of a report: its own terms, their total, and FedPU's term of any algorithm."""
        return ("total", "unlabelled", *self.losses)

    @property
    def shares_weights(self) -> bool:
        """Models are averaged, so every client must have the same architecture."""
        return self.down.weights or self.up.weights


CATALOG: dict[str, Algorithm] = {
    "local": Algorithm(
        title="Local",
        paper="baseline: every client trains alone",
        settings=NoSettings,
        down=Crossing(),
        up=Crossing(),
    ),
    "fedavg": Algorithm(
        title="FedAvg",
        paper="McMahan et al., AISTATS 2017",
        settings=NoSettings,
        down=Crossing(weights=True),
        up=Crossing(weights=True),
    ),
    "fedproto": Algorithm(
        title="FedProto",
        paper="Tan et al., AAAI 2022",
        settings=FedProtoSettings,
        down=Crossing(prototypes=True),
        up=Crossing(prototypes=True, counts=True),
        losses=("cross-entropy", "prototype"),
        averages_prototypes=True,
    ),
    "fedtgp": Algorithm(
        title="FedTGP",
        paper="Zhang et al., AAAI 2024",
        settings=FedTGPSettings,
        down=Crossing(prototypes=True),
        up=Crossing(prototypes=True),
        losses=("cross-entropy", "prototype"),
    ),
    "fedpcl": Algorithm(
        title="FedPCL",
        paper="Tan et al., NeurIPS 2022",
        settings=FedPCLSettings,
        down=Crossing(prototypes=True, local_sets=True),
        up=Crossing(prototypes=True, counts=True),
        losses=("contrast", "global", "local", "cross-entropy", "prototype"),
        averages_prototypes=True,
        frozen_backbones=True,
    ),
    "fedplvm": Algorithm(
        title="FedPLVM",
        paper="Wang et al., NeurIPS 2024",
        settings=FedPLVMSettings,
        down=Crossing(weights=True, prototypes=True, many_per_class=True),
        up=Crossing(weights=True, prototypes=True, many_per_class=True),
        losses=("cross-entropy", "contrast", "correction"),
    ),
    "protofed": Algorithm(
        title="ProtoFed",
        paper="Qiao et al., Prototype Helps Federated Learning, 2023",
        settings=ProtoFedSettings,
        down=Crossing(weights=True, prototypes=True),
        up=Crossing(weights=True, prototypes=True),
        averages_prototypes=True,
    ),
    "fedproto-avg": Algorithm(
        title="FedProto + averaging",
        paper="FedProto with FedAvg's model, a baseline of FedPLVM",
        settings=FedProtoSettings,
        down=Crossing(weights=True, prototypes=True),
        up=Crossing(weights=True, prototypes=True, counts=True),
        losses=("cross-entropy", "prototype"),
        averages_prototypes=True,
    ),
}
