"""LG-FedAvg: what it exchanges."""

from protofl_common.algorithms.base import Algorithm, both_ways
from protofl_common.wire.schema import Weights

ALGORITHM = Algorithm(
    title="LG-FedAvg",
    paper="Liang et al., 2020",
    client="client_app.algorithms.base",
    server="server_app.strategies.fedavg",
    exchange=both_ways(weights=Weights(parts=("head.",))),
    supports=("merging", "secagg", "late"),
    private=("weights",),
)
