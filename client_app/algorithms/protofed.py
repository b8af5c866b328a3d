"""ProtoFed (Qiao et al., "Prototype Helps Federated Learning", 2023), client half: FedAvg that predicts by prototypes.

Other half: `server_app/strategies/protofed.py`.
Symbols: f the body of the model; ỹ_{i,j} client i's prototype of class j, ȳ_j the global one.

Training            as FedAvg, cross-entropy (Eq. 1)
Upload (Eq. 2)      ỹ_{i,j} = mean of f(x) over this client's samples of class j, in the last round, with the weights
Inference (Eq. 4)   the label of the nearest ȳ_j in L2 under the global model; its classifier is reported beside it

Down: weights, and prototypes once there are any. Up: weights, in the last round also prototypes, never counts.

Deviations: the paper's curves predict by prototypes after every round: ``prototypes = "every-round"``. The text does
not say whether ỹ is taken from the model before or after local training; its Algorithm 1 updates first, and so do we.
"""

from client_app.algorithms.fedavg import FedAvg
from protofl_common.experiment.catalog import ProtoFedHparams


class ProtoFed(FedAvg[ProtoFedHparams]):
    """FedAvg that also sends class means when it is time; the global ones predict (Eq. 4)."""
