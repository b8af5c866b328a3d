"""FedRep: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class FedRepHparams(OwnHparams):
    head_epochs: int = option(
        default=10,
        minimum=0,
        at_most="max-epochs",
        help=(
            "τ: for how many epochs the head is trained on the received body, before the body's"
            " local-epochs; 0: heads stay as they were first drawn"
        ),
    )


ALGORITHM = Algorithm(
    title="FedRep",
    paper="Collins et al., ICML 2021",
    client="client_app.algorithms.fedrep",
    server="server_app.strategies.fedavg",
    hparams=FedRepHparams,
    exchange=both_ways(weights=Weights(parts=("body.",))),
    supports=("merging", "secagg", "late"),
    tasks=("single-label", "multi-label"),
)
