"""MOON: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class MOONHparams(OwnHparams):
    mu: float = option(
        default=0.5,
        minimum=0,
        help=(
            "weight μ of the contrast of models (Eq. 4); 0: FedAvg. The paper has 5 on CIFAR-10"
            " and 1 otherwise, PFLlib has 0"
        ),
    )
    temperature: float = option(default=0.5, above=0, help="τ (Eq. 3); PFLlib: 1")


ALGORITHM = Algorithm(
    title="MOON",
    paper="Li et al., CVPR 2021",
    client="client_app.algorithms.moon",
    server="server_app.strategies.fedavg",
    hparams=MOONHparams,
    exchange=both_ways(weights=Weights()),
    losses=("cross-entropy", "contrast"),
    supports=("merging", "secagg", "late"),
    private=("weights",),
)
