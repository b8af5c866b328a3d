"""FedORGP: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, ServerTrainingHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Vectors


class FedORGPHparams(ServerTrainingHparams):
    server_batch_size: int = option(
        default=32,
        minimum=0,
        help="client prototypes in one step of the server; 0: all at once",
    )
    lambda_: float = option(
        default=1.0,
        minimum=0,
        help="weight of the clients' alignment with the prototypes; the authors' commands: 10",
    )
    gamma: float = option(
        default=1.0,
        minimum=0,
        help="γ: weight of orthogonality in the server's loss; the authors' commands: 10",
    )


ALGORITHM = Algorithm(
    title="FedORGP",
    paper="Guo et al., 2025",
    client="client_app.algorithms.fedorgp",
    server="server_app.strategies.fedorgp",
    hparams=FedORGPHparams,
    exchange=both_ways(prototypes=Vectors()),
    losses=("cross-entropy", "prototype"),
    supports=("merging",),
    private=("prototypes",),
)
