"""FedAvg: what it exchanges."""

from protofl_common.algorithms.base import Algorithm
from protofl_common.wire.schema import Exchange, Weights

ALGORITHM = Algorithm(
    title="FedAvg",
    paper="McMahan et al., AISTATS 2017",
    client="client_app.algorithms.fedavg",
    server="server_app.strategies.fedavg",
    exchange=Exchange(down={"weights": Weights()}, up={"weights": Weights()}),
    supports=("merging", "secagg", "late"),
    private=("weights",),
    tasks=("single-label", "multi-label"),
)
