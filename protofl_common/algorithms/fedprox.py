"""FedProx: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class FedProxHparams(OwnHparams):
    mu: float = option(
        default=0.01,
        minimum=0,
        help="weight μ of the proximal term (Eq. 2); 0: FedAvg",
    )


ALGORITHM = Algorithm(
    title="FedProx",
    paper="Li et al., MLSys 2020",
    client="client_app.algorithms.fedprox",
    server="server_app.strategies.fedavg",
    hparams=FedProxHparams,
    exchange=both_ways(weights=Weights()),
    losses=("cross-entropy", "proximal"),
    supports=("merging", "secagg", "late"),
    private=("weights",),
    tasks=("single-label", "multi-label"),
)
