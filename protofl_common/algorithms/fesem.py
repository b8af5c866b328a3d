"""FeSEM: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class FeSEMHparams(OwnHparams):
    centres: int = option(default=2, minimum=1, help="K, the number of global models; 1: FedAvg")


ALGORITHM = Algorithm(
    title="FeSEM",
    paper="Xie et al., Multi-Center Federated Learning, 2020",
    client="client_app.algorithms.fedavg",
    server="server_app.strategies.fesem",
    hparams=FeSEMHparams,
    exchange=both_ways(weights=Weights()),
    supports=("merging",),
    private=("weights",),
    single_uploads="its server groups the clients by their models",
)
