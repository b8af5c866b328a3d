"""SCAFFOLD: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Weights


class SCAFFOLDHparams(OwnHparams):
    server_lr: float = option(
        default=1.0,
        above=0,
        help="η_g: how far the global model moves to the mean of the clients' models",
    )


ALGORITHM = Algorithm(
    title="SCAFFOLD",
    paper="Karimireddy et al., ICML 2020",
    client="client_app.algorithms.scaffold",
    server="server_app.strategies.scaffold",
    hparams=SCAFFOLDHparams,
    exchange=Exchange(
        down={
            "weights": Weights(),
            "control": Weights("control", meaning="the mean of all control variates"),
        },
        up={
            "weights": Weights(),
            "control": Weights("change", meaning="the change of its control variate"),
        },
    ),
    supports=("merging",),
    private=("weights", "control"),
    single_uploads="its server gives every client the same weight",
    tasks=("single-label", "multi-label"),
)
