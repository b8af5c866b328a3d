"""MPFT: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, ServerTrainingHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors, Weights


class MPFTHparams(ServerTrainingHparams):
    server_epochs: int = option(
        default=200,
        minimum=1,
        help="how often the server goes over all centres",
    )
    server_lr: float = option(default=0.001, above=0, help="learning rate of the server's AdamW")
    server_batch_size: int = option(
        default=32,
        minimum=0,
        help="centres in one step of the server; 0: all at once",
    )
    sample_ratio: float = option(
        default=0.1,
        above=0,
        maximum=1,
        help=(
            "ρ: a client sends the centres of this share of its samples of each class, at least one"
        ),
    )


ALGORITHM = Algorithm(
    title="MPFT",
    paper="Zhang et al., ICLR 2025",
    client="client_app.algorithms.mpft",
    server="server_app.strategies.mpft",
    hparams=MPFTHparams,
    exchange=Exchange(
        down={"weights": Weights()}, up={"prototypes": Vectors(width="backbones", several=True)}
    ),
    losses=(),
    frozen_backbones=True,
    supports=("merging",),
)
