"""Per-FedAvg: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Weights


class PerFedAvgHparams(OwnHparams):
    alpha: float = option(
        default=0.01,
        minimum=0,
        help="α, the inner learning rate; the outer β is lr",
    )


ALGORITHM = Algorithm(
    title="Per-FedAvg",
    paper="Fallah et al., NeurIPS 2020",
    client="client_app.algorithms.per_fedavg",
    server="server_app.strategies.fedavg",
    hparams=PerFedAvgHparams,
    exchange=Exchange(down={"weights": Weights()}, up={"weights": Weights()}),
    supports=("merging", "secagg", "late"),
)
