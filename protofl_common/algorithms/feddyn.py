"""FedDyn: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class FedDynHparams(OwnHparams):
    alpha: float = option(
        default=1.0,
        above=0,
        help=(
            "α: how strongly a client is drawn to the global model, and how much its gradient of"
            " earlier rounds counts; the authors' code has 0.01, PFLlib 1; with 0.1 one of our"
            " runs lost its model"
        ),
    )


ALGORITHM = Algorithm(
    title="FedDyn",
    paper="Acar et al., ICLR 2021",
    client="client_app.algorithms.feddyn",
    server="server_app.strategies.feddyn",
    hparams=FedDynHparams,
    exchange=both_ways(weights=Weights()),
    supports=("merging",),
    private=("weights",),
    single_uploads="its server gives every client the same weight",
)
