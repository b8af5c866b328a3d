"""FPL: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors, Weights


class FPLHparams(OwnHparams):
    global_clusters = "finch"  # fixed, like the next one: no settings
    kmeans_clusters = 0
    lambda_: float = option(
        default=1.0,
        minimum=0,
        help="weight of both prototype terms (Eq. 12: 1); 0: FedAvg",
    )
    temperature: float = option(
        default=0.2,
        above=0,
        help="τ (Eq. 7); the paper has 0.02, with a learning rate of 0.01",
    )
    contrast: bool = option(
        default=True,
        help="the contrastive term (Eq. 8); false: ablation (Table 1)",
    )
    consistency: str = option(
        default="mse",
        choices=("squared-l2", "mse", "none"),
        help=(
            "the consistency term: mse (the authors' code), squared-l2 (Eq. 10, D times as much),"
            " or none (Table 1)"
        ),
    )


ALGORITHM = Algorithm(
    title="FPL",
    paper="Huang et al., CVPR 2023",
    client="client_app.algorithms.fpl",
    server="server_app.strategies.fedplvm",
    hparams=FPLHparams,
    exchange=Exchange(
        down={"weights": Weights(), "prototypes": Vectors(several=True)},
        up={"weights": Weights(), "prototypes": Vectors()},
    ),
    losses=("cross-entropy", "contrast", "consistency"),
    supports=("merging",),
    private=("weights", "prototypes"),
    tasks=("single-label", "multi-label"),
)
