"""FedGen: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Counts, Exchange, Weights


class FedGenHparams(OwnHparams):
    lambda_: float = option(
        default=1.0,
        minimum=0,
        help="weight of the loss of the generated features; 0: the server only averages the head",
    )
    noise_dim: int = option(
        default=32,
        minimum=1,
        maximum=4096,
        help="how many random numbers the generator gets for a feature",
    )
    server_steps: int = option(default=100, minimum=1, help="the generator's updates in a round")
    server_lr: float = option(
        default=0.0003,
        above=0,
        help=(
            "learning rate of the generator's Adam (the authors' code; HtFLlib: 0.005, FedTGP: 0.1)"
        ),
    )
    server_batch_size: int = option(default=10, minimum=2, help="generated features per update")


ALGORITHM = Algorithm(
    title="FedGen",
    paper="Zhu et al., ICML 2021",
    client="client_app.algorithms.fedgen",
    server="server_app.strategies.fedgen",
    hparams=FedGenHparams,
    exchange=Exchange(
        down={
            "weights": Weights(parts=("head.",)),
            "generator": Weights(of="generator"),
            "label_counts": Counts(),
        },
        up={"weights": Weights(parts=("head.",)), "label_counts": Counts()},
    ),
    losses=("cross-entropy", "generated"),
    supports=("merging", "secagg"),
    private=("weights", "label_counts"),
)
