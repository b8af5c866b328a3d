"""Per-FedAvg: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


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
    exchange=both_ways(weights=Weights()),
    supports=("merging", "secagg", "late"),
)
