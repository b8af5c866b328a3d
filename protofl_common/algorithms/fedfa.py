"""FedFA: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Weights


class FedFAHparams(OwnHparams):
    probability: float = option(
        default=0.5,
        minimum=0,
        maximum=1,
        help=(
            "p: the probability that a batch is augmented behind a stage of the network; 0: FedAvg"
        ),
    )


ALGORITHM = Algorithm(
    title="FedFA",
    paper="Zhou & Konukoglu, ICLR 2023",
    client="client_app.algorithms.fedfa",
    server="server_app.strategies.fedfa",
    hparams=FedFAHparams,
    exchange=Exchange(
        down={
            "weights": Weights(),
            "coefficients": Weights(
                "augmentation", ("coefficients.",), meaning="how much feature maps vary"
            ),
        },
        up={
            "weights": Weights(),
            "averages": Weights(
                "augmentation", ("averages.",), meaning="means and spreads of feature maps"
            ),
        },
    ),
    supports=("merging",),
    single_uploads="its server takes the variance over the clients",
)
