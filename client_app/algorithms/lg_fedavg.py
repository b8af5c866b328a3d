"""LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020), client half: a body of its own under a common head.

Other half: `server_app/strategies/lg_fedavg.py`.
Symbols: ℓ_m the local model of client m, x → features, which is the body; g the global model, features → logits, which
is the head.

Training            of ℓ_m and g together, by cross-entropy
Evaluation          of ℓ_m under the global head, before it trains

Down and up: g. Stays: ℓ_m, of any architecture.

Deviations: the authors' code starts all clients from a model that FedAvg has trained; here those of one architecture
start from the same untrained weights. Ensembles for clients that never trained are not there, nor fair representations.
"""

from client_app.algorithms.base import ClientAlgorithm
from protofl_common.experiment.catalog import Hparams


class LGFedAvg(ClientAlgorithm[Hparams]):
    """FedAvg of the heads; the bodies live on."""
