"""FedBN (Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021).

FedAvg of all weights but those of normalisation layers, which stay at the client. The row says so, and says all: both
halves are there already.
"""

from protofl_common.experiment.catalog import Algorithm
from protofl_common.wire.schema import Exchange, Weights

SHARED = Weights(normalisation=False)
ROW = Algorithm(
    title="FedBN",
    paper="Li et al., ICLR 2021",
    client="client_app.algorithms.fedper:FedPer",
    server="server_app.strategies.fedavg:FedAvg",
    exchange=Exchange(down={"weights": SHARED}, up={"weights": SHARED}),
    supports=("merging", "secagg"),
)
