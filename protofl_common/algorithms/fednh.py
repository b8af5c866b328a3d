"""FedNH: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors, Weights


class FedNHHparams(OwnHparams):
    smoothing: float = option(
        default=0.9,
        minimum=0,
        maximum=1,
        help=(
            "ρ: how much of a class prototype remains in a round; 1: the prototypes stay as they"
            " were drawn"
        ),
    )
    scale: float = option(
        default=1.0,
        above=0,
        help="s before the first round: the logits are s times the cosines, and s is trained",
    )


ALGORITHM = Algorithm(
    title="FedNH",
    paper="Dai et al., AAAI 2023",
    client="client_app.algorithms.fednh",
    server="server_app.strategies.fednh",
    hparams=FedNHHparams,
    exchange=Exchange(
        down={"weights": Weights(), "prototypes": Vectors()},
        up={"weights": Weights(), "prototypes": Vectors(counts=True)},
    ),
    averages_prototypes=True,
    supports=("merging",),
    private=("weights", "prototypes"),
    single_uploads="its server scales every client's prototypes to length 1",
)
