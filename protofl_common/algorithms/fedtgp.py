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
        help="weight of the prototype term (Eq. 11); 0.1 is the paper's value, also for FedProto",
    )
    distance: str = option(
        default="l2",
        choices=("l2", "squared-l2", "l1", "mse"),
        help="the distance φ of Eq. 11, as in fedproto",
    )
    granularity: str = option(
        default="class-mean",
        choices=("class", "class-mean", "sample"),
        help=(
            "what the distance is taken of. class-mean: the batch's class means, averaged over its"
            " classes (Eq. 11); class: the same, summed; sample: each sample's features, averaged"
            " over samples"
        ),
    )
    margin: str = option(
        default="adaptive",
        choices=("adaptive", "nearest", "fixed", "none"),
        help=(
            "the margin δ. adaptive: the largest distance of two mean prototypes (Eq. 9); nearest:"
            " the largest distance of a mean prototype to its nearest one (the authors' code);"
            " fixed: margin-threshold (Eq. 7); none (Eq. 6)"
        ),
    )
    margin_threshold: float = option(
        default=10.0,
        minimum=0,
        help=(
            "τ, the largest adaptive margin, or the fixed margin; the paper has 100, with which"
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
    supports=("merging",),
    private=("prototypes",),
    tasks=("single-label", "multi-label"),
)
