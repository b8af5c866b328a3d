"""FedProto with model averaging, and ProtoFed, server half: FedAvg's model, FedProto's prototypes.

Other half: `client_app/algorithms/fedproto_avg.py`.
Equations: `server_app/strategies/fedavg.py` for the weights, `server_app/strategies/fedproto.py`
for the prototypes.

ProtoFed is Qiao et al., "Prototype Helps Federated Learning", 2023; its client is FedAvg's.
Symbols: f the body of the model; ỹ_{i,j} client i's prototype of class j; φ the clients that hold
the class.

Weights             as FedAvg; clients train by cross-entropy (Eq. 1)
Upload (Eq. 2)      ỹ_{i,j} = mean of f(x) over the client's samples of class j, after training,
                    beside the weights
Prototypes (Eq. 3)  ȳ_j = (1 / |φ|) Σ_{i∈φ} ỹ_{i,j}, in the last round or in every round
                    (`protofed.prototypes`)
Inference (Eq. 4)   the label of the nearest ȳ_j in L2 under the global model; its classifier is
                    reported beside it

Down: weights, and prototypes once there are any. Up: weights, and prototypes; ProtoFed's without
counts.

``merging`` may put a median or trimmed mean in the place of Eq. 3, and of FedAvg's mean.

Deviations: the paper's curves predict by prototypes after every round: ``prototypes =
"every-round"``. The text does not say whether ỹ is taken from the model before or after local
training; its Algorithm 1 updates first, and so do we.
"""

from protofl_common.algorithms.fedproto import FedProtoHparams
from server_app.strategies.fedavg import FedAvg
from server_app.strategies.fedproto import FedProto


class FedProtoAvg(FedProto, FedAvg[FedProtoHparams]):
    """Keeps the global model and the global prototypes."""

    state = ("weights", "prototypes")
