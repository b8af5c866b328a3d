"""The catalog: one row per algorithm. Its keys are the legal values of ``algo``.

A row says what crosses the wire, and the wire code (`messages.py`) enforces it in both directions: nothing that a
row does not declare can be packed or is accepted. The server half of an algorithm stands in
``server_app/strategies``, the client half in ``client_app/algorithms``, under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofl_common.options import option

DISTANCES = ("l2", "squared-l2", "l1", "mse")
GRANULARITIES = ("class", "class-mean", "sample")
"""How `losses.prototype_alignment` may measure; one choice for every algorithm that uses it."""


@dataclass(frozen=True)
class Crossing:
    """What one direction of an exchange carries."""

    prototypes: bool = False
    """Class prototypes: means [P, D] and labels [P]."""
    counts: bool = False
    """Samples behind each prototype, [P]. Some papers promise not to reveal them."""
    weights: bool = False
    """The whole model."""


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
class Algorithm:
    """One row."""

    title: str
    paper: str
    settings: type
    down: Crossing
    up: Crossing

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
    ),
    "fedtgp": Algorithm(
        title="FedTGP",
        paper="Zhang et al., AAAI 2024",
        settings=FedTGPSettings,
        down=Crossing(prototypes=True),
        up=Crossing(prototypes=True),
    ),
    "protofed": Algorithm(
        title="ProtoFed",
        paper="Qiao et al., Prototype Helps Federated Learning, 2023",
        settings=ProtoFedSettings,
        down=Crossing(weights=True, prototypes=True),
        up=Crossing(weights=True, prototypes=True),
    ),
}
