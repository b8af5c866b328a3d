"""FedDAP: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors, Weights


class FedDAPHparams(OwnHparams):
    lambda1: float = option(
        default=1.0,
        minimum=0,
        help="weight of the alignment with prototypes of the client's domain",
    )
    lambda2: float = option(
        default=1.0,
        minimum=0,
        help="weight of the contrast with prototypes of other domains",
    )
    temperature: float = option(
        default=0.2,
        above=0,
        help="τ of the contrast; the authors' code has 0.02, with a learning rate of 0.01",
    )
    fusion_temperature: float = option(
        default=0.001,
        above=0,
        help=(
            "T: the smaller it is, the closer a domain's prototype is to that of the one client"
            " that is most like the domain's other clients"
        ),
    )


ALGORITHM = Algorithm(
    title="FedDAP",
    paper="Le et al., CVPR 2026",
    client="client_app.algorithms.feddap",
    server="server_app.strategies.feddap",
    hparams=FedDAPHparams,
    exchange=Exchange(
        down={
            "weights": Weights(),
            "prototypes": Vectors(),
            "others": Vectors(several=True),
        },
        up={"weights": Weights(), "prototypes": Vectors()},
    ),
    losses=("cross-entropy", "alignment", "contrast"),
    supports=("merging",),
    private=("weights", "prototypes"),
)
