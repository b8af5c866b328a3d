"""FedProto with model averaging, server half: FedAvg's model and FedProto's prototypes, side by side.

Other half: `client_app/algorithms/fedproto_avg.py`.
Equations: `server_app/strategies/fedavg.py` for the weights, `server_app/strategies/fedproto.py` for the prototypes.
"""

from protofl_common.experiment.catalog import FedProtoHparams
from server_app.strategies.fedavg import FedAvg
from server_app.strategies.fedproto import FedProto


class FedProtoAvg(FedProto, FedAvg[FedProtoHparams]):
    """Keeps the global model and the global prototypes."""

    state: tuple[str, ...] = ("weights", "prototypes")
