"""FedAvg: what it exchanges."""

from protofl_common.algorithms.base import Algorithm, both_ways
from protofl_common.wire.schema import Weights

ALGORITHM = Algorithm(
    title="FedAvg",
    paper="McMahan et al., AISTATS 2017",
    client="client_app.algorithms.fedavg",
    server="server_app.strategies.fedavg",
    exchange=both_ways(weights=Weights()),
    supports=("merging", "secagg", "late"),
    private=("weights",),
    tasks=("single-label", "multi-label"),
)
