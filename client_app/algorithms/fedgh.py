"""FedGH (Yi et al., ACM Multimedia 2023), client half: its own feature extractor under the global prediction header.

Other half: `server_app/strategies/fedgh.py`.
Symbols: φ_k the extractor (body) of client k, of any architecture; θ the header (head), one for all; D_k^s its training
samples of class s.

Start of a round    the local header ← θ
Training            cross-entropy, extractor and header together
Upload              R̄_k^s = 1/|D_k^s| Σ_{x ∈ D_k^s} φ_k(x), mean representations of its classes, after training
Inference           θ(φ_k(x)), with the header just received

Down: θ. Up: R̄_k^s without counts. Stays: φ_k.

Deviations: a representation is one mean over all samples of the class, in the authors' code a mean of batches' means,
both in evaluation mode. That code evaluates after local training, and clips gradients.
"""

from client_app.algorithms.base import ClientAlgorithm
from protofl_common.experiment.catalog import ServerTrainingHparams


class FedGH(ClientAlgorithm[ServerTrainingHparams]):
    """FedAvg's client, but only the header comes down, and prototypes go up."""
