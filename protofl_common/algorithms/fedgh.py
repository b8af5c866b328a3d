"""FedGH: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, ServerTrainingHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors, Weights


class FedGHHparams(ServerTrainingHparams):
    server_epochs: int = option(
        default=100,
        minimum=1,
        help=(
            "how often the server goes over the round's representations (HtFLlib); the abstract"
            " and the authors' code: 1"
        ),
    )
    server_lr: float = option(default=0.01, above=0, help="η, learning rate of the server's SGD")
    server_batch_size: int = option(
        default=10,
        minimum=0,
        help=(
            "representations in one step of the server (HtFLlib); 0: all at once; the abstract and"
            " the authors' code: 1"
        ),
    )


ALGORITHM = Algorithm(
    title="FedGH",
    paper="Yi et al., ACM Multimedia 2023",
    client="client_app.algorithms.base",
    server="server_app.strategies.fedgh",
    hparams=FedGHHparams,
    exchange=Exchange(down={"weights": Weights(parts=("head.",))}, up={"prototypes": Vectors()}),
    supports=("merging",),
    private=("prototypes",),
)
