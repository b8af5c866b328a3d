"""FedBN: what it exchanges."""

from protofl_common.algorithms.base import Algorithm
from protofl_common.wire.schema import Exchange, Weights

ALGORITHM = Algorithm(
    title="FedBN",
    paper="Li et al., ICLR 2021",
    client="client_app.algorithms.base",
    server="server_app.strategies.fedavg",
    exchange=Exchange(
        down={"weights": Weights(normalisation=False)}, up={"weights": Weights(normalisation=False)}
    ),
    supports=("merging", "secagg", "late"),
    private=("weights",),
    tasks=("single-label", "multi-label"),
)
