"""FedSA: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors


class FedSAHparams(OwnHparams):
    regularization: float = option(
        default=1.0,
        minimum=0,
        help="weight of the distance from the anchors; the authors' commands have 10, at lr 0.01",
    )
    contrast: float = option(
        default=0.1,
        minimum=0,
        help="weight of the contrast with the anchors; the authors' commands have 1",
    )
    calibration: float = option(
        default=1.0,
        minimum=0,
        help="weight of the classifier's cross-entropy on the anchors",
    )
    smoothing: float = option(
        default=0.9999,
        minimum=0,
        maximum=1,
        help="α: how much of an anchor remains in a round; 1: the anchors stay as they were drawn",
    )


ALGORITHM = Algorithm(
    title="FedSA",
    paper="Zhou et al., AAAI 2025",
    client="client_app.algorithms.fedsa",
    server="server_app.strategies.fedsa",
    hparams=FedSAHparams,
    exchange=Exchange(
        down={"anchors": Vectors(), "prototypes": Vectors()}, up={"prototypes": Vectors()}
    ),
    losses=("cross-entropy", "regularization", "contrast", "calibration"),
    averages_prototypes=True,
    supports=("merging", "secagg", "late"),
    private=("prototypes",),
    tasks=("single-label", "multi-label"),
)
