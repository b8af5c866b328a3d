"""FedBN: what it exchanges."""

from protofl_common.algorithms.base import Algorithm, both_ways
from protofl_common.wire.schema import Weights

ALGORITHM = Algorithm(
    title="FedBN",
    paper="Li et al., ICLR 2021",
    client="client_app.algorithms.base",
    server="server_app.strategies.fedavg",
    exchange=both_ways(weights=Weights(normalisation=False)),
    supports=("merging", "secagg", "late"),
    private=("weights",),
    tasks=("single-label", "multi-label"),
)
