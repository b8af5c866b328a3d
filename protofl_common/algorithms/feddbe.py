"""FedDBE: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Weights


class FedDBEHparams(OwnHparams):
    kappa: float = option(
        default=5.0,
        minimum=0,
        help=(
            "κ: how strongly a client's mean feature is drawn to that of all clients; the authors"
            " have 50, with 512 features and a learning rate of 0.005, PFLlib has 0"
        ),
    )
    momentum: float = option(
        default=1.0,
        above=0,
        maximum=1,
        help=(
            "μ: weight of the newest batch in a client's mean feature; on Fashion-MNIST the"
            " authors have 1, PFLlib has 0.1"
        ),
    )


ALGORITHM = Algorithm(
    title="FedDBE",
    paper="Zhang et al., NeurIPS 2023",
    client="client_app.algorithms.feddbe",
    server="server_app.strategies.feddbe",
    hparams=FedDBEHparams,
    exchange=Exchange(
        down={
            "weights": Weights(),
            "mean": Weights("consensus", meaning="the mean feature of all clients"),
        },
        up={
            "weights": Weights(),
            "mean": Weights("running", meaning="its mean feature"),
        },
    ),
    losses=("cross-entropy", "mean-regularization"),
    supports=("merging", "secagg", "late"),
)
