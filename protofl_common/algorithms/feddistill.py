"""FedDistill: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors


class FedDistillHparams(OwnHparams):
    gamma: float = option(
        default=0.3,
        minimum=0,
        help=(
            "γ, weight of the distance to the teacher; 0: training alone. The paper names no"
            " value; FedTGP's paper has 1, with which a client's network may stop learning"
        ),
    )
    outputs: str = option(
        default="probabilities",
        choices=("probabilities", "logits"),
        help=(
            "what is sent of each class. probabilities: the other clients' probabilities teach"
            " (the paper); logits: the logits of all clients teach, by squared distance (HtFLlib)"
        ),
    )

    def exchange(self, declared: Exchange) -> Exchange:
        """Return the exchange; with ``outputs = "logits"`` uploads need not be probabilities."""
        if self.outputs == "probabilities":
            return declared
        # uploads are declared as the same vectors as those that go down, which need not be
        # probabilities
        return Exchange(down=declared.down, up=declared.down)


ALGORITHM = Algorithm(
    title="FedDistill",
    paper="FD; Jeong et al., 2018",
    client="client_app.algorithms.feddistill",
    server="server_app.strategies.feddistill",
    hparams=FedDistillHparams,
    exchange=Exchange(
        down={"outputs": Vectors(width="classes")},
        up={"outputs": Vectors(width="classes", probabilities=True)},
    ),
    losses=("cross-entropy", "distillation"),
    averages_prototypes=True,
    supports=("merging",),
    single_uploads="what teaches a client is the mean of the others' outputs",
)
