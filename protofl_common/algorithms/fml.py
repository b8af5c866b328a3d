"""FML: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.architectures import architecture_option
from protofl_common.config.options import option
from protofl_common.wire.schema import Weights


class FMLHparams(OwnHparams):
    alpha: float = option(
        default=0.5,
        minimum=0,
        maximum=1,
        help=(
            "α: weight of the private model's cross-entropy, where its mutual term has 1 - α; 1:"
            " training alone. It slows the model as a learning rate of α · lr would"
        ),
    )
    beta: float = option(default=0.5, minimum=0, maximum=1, help="β: the same of the meme model")
    meme: str = architecture_option(
        help='architecture of the meme model; "": the first of `models`',
    )
    mutual: str = option(
        default="detached",
        choices=("detached", "coupled"),
        help=(
            "detached: each model learns from the other's predictions, which are held fixed;"
            " coupled: both models move (HtFLlib)"
        ),
    )


ALGORITHM = Algorithm(
    title="FML",
    paper="Shen et al., 2020",
    client="client_app.algorithms.fml",
    server="server_app.strategies.fedavg",
    hparams=FMLHparams,
    exchange=both_ways(weights=Weights("meme", meaning="all weights of the meme, a shared model")),
    losses=("cross-entropy", "mutual", "meme-cross-entropy", "meme-mutual"),
    supports=("merging", "secagg", "late"),
    private=("weights",),
)
