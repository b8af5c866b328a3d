"""FedProto + averaging: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm
from protofl_common.algorithms.fedproto import FedProtoHparams
from protofl_common.wire.schema import Exchange, Vectors, Weights

ALGORITHM = Algorithm(
    title="FedProto + averaging",
    paper="FedProto with FedAvg's model, a baseline of FedPLVM",
    client="client_app.algorithms.fedproto_avg",
    server="server_app.strategies.fedproto_avg",
    hparams=FedProtoHparams,
    exchange=Exchange(
        down={"weights": Weights(), "prototypes": Vectors()},
        up={"weights": Weights(), "prototypes": Vectors(counts=True)},
    ),
    losses=("cross-entropy", "prototype"),
    averages_prototypes=True,
    supports=("merging", "secagg", "late"),
    private=("weights", "prototypes"),
    tasks=("single-label", "multi-label"),
)
