"""FedTGP: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import (
    Algorithm,
    AlignmentHparams,
    ServerTrainingHparams,
    both_ways,
)
from protofl_common.config.options import option
from protofl_common.wire.schema import Vectors


class FedTGPHparams(ServerTrainingHparams, AlignmentHparams):
    lambda_: float = option(
        default=0.1,
        minimum=0,
        help=(
            "weight of the prototype term (Eq. 11); 0.1 is the paper's, which takes it for"
            " FedProto too"
        ),
    )
    distance: str = option(
        default="l2",
        choices=("l2", "squared-l2", "l1", "mse"),
        help="as in fedproto (Eq. 11)",
    )
    granularity: str = option(
        default="class-mean",
        choices=("class", "class-mean", "sample"),
        help=(
            "class-mean: distance of the batch's class means, averaged over its classes (Eq. 11);"
            " class, sample"
        ),
    )
    margin: str = option(
        default="adaptive",
        choices=("adaptive", "nearest", "fixed", "none"),
        help=(
            "adaptive (Eq. 9); nearest: largest nearest-centre distance (authors' code); fixed"
            " (Eq. 7); none (Eq. 6)"
        ),
    )
    margin_threshold: float = option(
        default=10.0,
        minimum=0,
        help=(
            "τ, the largest adaptive margin, or the fixed one; the paper has 100, with which"
            " training breaks down at our lr and momentum"
        ),
    )
    transform: bool = option(
        default=True,
        help=(
            "the server's two-layer network F on top of the trainable vectors; false: ablation"
            ' "w/o F"'
        ),
    )


ALGORITHM = Algorithm(
    title="FedTGP",
    paper="Zhang et al., AAAI 2024",
    client="client_app.algorithms.fedproto",
    server="server_app.strategies.fedtgp",
    hparams=FedTGPHparams,
    exchange=both_ways(prototypes=Vectors()),
    losses=("cross-entropy", "prototype"),
    aligning=("prototype",),
    supports=("merging",),
    private=("prototypes",),
    tasks=("single-label", "multi-label"),
)
