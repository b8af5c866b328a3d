"""FedPLVM: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import CLUSTERINGS, Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Vectors, Weights


class FedPLVMHparams(OwnHparams):
    lambda_: float = option(
        default=1.0,
        minimum=0,
        help=(
            "weight of the prototype loss (Eq. 10); the paper has 1 on DomainNet, 100 on Digit-5"
            " and Office-10"
        ),
    )
    alpha: float = option(
        default=0.25,
        above=0,
        maximum=1,
        help="sparsity: similarities are cos^alpha (Eq. 7)",
    )
    temperature: float = option(default=0.07, above=0, help="τ (Eq. 6)")
    contrast: bool = option(default=True, help="the contrastive term (Eq. 6); false: ablation")
    correction: str = option(
        default="sum",
        choices=("sum", "mean", "centre", "none"),
        help=(
            "the correction term: sum (Eq. 8), mean (Eq. 8 / C_y), centre (the authors' code), or"
            " none (the paper's ablation)"
        ),
    )
    similarity_floor: float = option(
        default=1e-06,
        above=0,
        maximum=1,
        help="cosines below it count as it and pass no gradient",
    )
    local_clusters: str = option(
        default="finch",
        choices=CLUSTERINGS,
        help=(
            "how a client makes its prototypes of a class: finch (Eq. 3), kmeans, or average (one"
            " mean)"
        ),
    )
    global_clusters: str = option(
        default="finch",
        choices=(*CLUSTERINGS, "none"),
        help=(
            "how the server clusters the clients' prototypes: finch (Eq. 4), kmeans, average, or"
            " none (it keeps them all, Table 4)"
        ),
    )
    kmeans_clusters: int = option(
        default=0,
        minimum=0,
        help="K of kmeans; 0: as many as FINCH finds (Table 9)",
    )


ALGORITHM = Algorithm(
    title="FedPLVM",
    paper="Wang et al., NeurIPS 2024",
    client="client_app.algorithms.fedplvm",
    server="server_app.strategies.fedplvm",
    hparams=FedPLVMHparams,
    exchange=both_ways(weights=Weights(), prototypes=Vectors(several=True)),
    losses=("cross-entropy", "contrast", "correction"),
    supports=("merging",),
    tasks=("single-label", "multi-label"),
)
