"""FedPer (Arivazhagan et al., "Federated Learning with Personalization Layers", 2019), client half: heads of their own.

Other half: `server_app/strategies/fedavg.py`; the server is FedAvg's, of the base layers.
Symbols: W_B the base layers, which all share; W_P the last K_P = ``personal-layers`` layers, this client's own.

Training            as FedAvg, base and personal layers together
Evaluation          of the global base layers under the client's own personal ones, before it trains

Down and up: W_B. Stays: W_P.

Deviations: personal layers start alike, as in FedRep's code and PFLlib; the text draws them at each client. A layer is
whatever has weights of its own, batch normalisation too. FedProto compares with FedPer on MNIST with both linear layers
personal (106,000 numbers a round for 20 clients): ``personal-layers = 2``.
"""

from client_app.algorithms.base import ClientAlgorithm
from protofl_common.experiment.catalog import FedPerHparams


class FedPer(ClientAlgorithm[FedPerHparams]):
    """FedAvg of what the exchange declares; the personal layers live on with the model."""
