"""ProtoFed: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Vectors, Weights


class ProtoFedHparams(OwnHparams):
    weighting = "uniform"  # fixed: no setting
    prototypes: str = option(
        default="last-round",
        choices=("last-round", "every-round"),
        help=(
            "when clients send prototypes: in the last-round (the paper), or in every-round (the"
            " paper's accuracy curves)"
        ),
    )

    def due(self, server_round: int, rounds: int) -> bool:
        return server_round == rounds or self.prototypes == "every-round"

    @property
    def needs_last_round(self) -> str:
        if self.prototypes == "every-round":
            return ""
        return "protofed.prototypes = 'every-round'"


ALGORITHM = Algorithm(
    title="ProtoFed",
    paper="Qiao et al., Prototype Helps Federated Learning, 2023",
    client="client_app.algorithms.fedavg",
    server="server_app.strategies.fedproto_avg",
    hparams=ProtoFedHparams,
    exchange=both_ways(weights=Weights(), prototypes=Vectors()),
    averages_prototypes=True,
    supports=("merging", "secagg", "late"),
    private=("weights", "prototypes"),
)
