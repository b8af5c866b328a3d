"""FedTGP (Zhang et al., AAAI 2024), client half: FedProto's, with the server's trainable prototypes as targets.

Other half: `server_app/strategies/fedtgp.py`.
Symbols: P̂^c the server's prototype of class c; P_i^c client i's; φ Euclidean distance; λ = `lambda`.

Loss (Eq. 11)       L = CE + λ · E_c φ(P_i^c, P̂^c), E_c the mean over classes
Upload              P_i^c = mean of f(x) over this client's training samples of class c, after training
Inference           the label of the nearest P̂^c in L2; the head's prediction is reported beside it

Down: P̂. Up: local prototypes, *without* how many samples stand behind them. Stays: model and optimizer.

Deviations: P_i^c in the loss is taken over the batch, as in FedProto. The authors' code uploads prototypes of the
model as it was before the round (their model is reloaded from disk); ours are those of the trained model.
"""

from client_app.algorithms.fedproto import FedProto
from protofl_common.experiment.catalog import FedTGPHparams


class FedTGP(FedProto[FedTGPHparams]):
    """FedProto's client with its own defaults (`fedtgp.lambda`, …), and no class counts on the wire."""
