"""pFedMe: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, both_ways
from protofl_common.algorithms.ditto import DittoHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class PFedMeHparams(DittoHparams):
    lambda_: float = option(
        default=15.0,
        minimum=0,
        help="λ: how strongly the personalised model is drawn to the local one",
    )
    personal_steps: int = option(
        default=5,
        minimum=1,
        at_most="max-epochs",
        help=(
            "K, steps of the personalised model per batch; their rate η_p is lr (the authors have"
            " 0.1 and 0.09 on MNIST)"
        ),
    )
    eta: float = option(
        default=0.05,
        above=0,
        help=(
            "η: after each batch the local model goes η · λ of the way to the personalised one;"
            " the authors have 0.005"
        ),
    )
    beta: float = option(
        default=1.0,
        above=0,
        help=(
            "β: how far the global model moves to the mean of the clients' models; 1: all the way,"
            " as FedAvg; the paper tries 1 to 4"
        ),
    )


ALGORITHM = Algorithm(
    title="pFedMe",
    paper="Dinh et al., NeurIPS 2020",
    client="client_app.algorithms.pfedme",
    server="server_app.strategies.pfedme",
    hparams=PFedMeHparams,
    exchange=both_ways(weights=Weights()),
    supports=("merging", "secagg", "late"),
)
