"""Ditto: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class DittoHparams(OwnHparams):
    lambda_: float = option(
        default=1.0,
        minimum=0,
        help=(
            "λ: how strongly the personal model is drawn to the global one; 0: training alone,"
            " from a common start"
        ),
    )


ALGORITHM = Algorithm(
    title="Ditto",
    paper="Li et al., ICML 2021",
    client="client_app.algorithms.ditto",
    server="server_app.strategies.fedavg",
    hparams=DittoHparams,
    exchange=both_ways(weights=Weights()),
    losses=("cross-entropy", "global-cross-entropy"),
    supports=("merging", "secagg", "late"),
    tasks=("single-label", "multi-label"),
)
