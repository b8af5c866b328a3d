"""FedFA, client half: train on maps of other means and spreads.

Source: Zhou & Konukoglu, "Federated Feature Augmentation", ICLR 2023.
Other half: `server_app/strategies/fedfa.py`.
Symbols: X [B, C, …] maps behind a stage of the network; μ, σ [B, C] their means and standard
deviations over pixels; Σ²_μ, Σ²_σ [C] the variances of these over the batch; γ_μ, γ_σ [C] the
server's coefficients; p = ``probability``.

Augmented maps      X̂ = σ̂ (X − μ) / σ + μ̂,
                    μ̂ ~ N(μ, (γ_μ + 1) Σ²_μ),   σ̂ ~ N(σ, (γ_σ + 1) Σ²_σ)
                    behind every stage, for each batch with probability p, in training only
Averages            μ̄ ← 0.99 μ̄ + 0.01 · mean over the batch of μ, from 0; σ̄ likewise, from 1;
                    anew in every round, at each batch that is augmented:
                    after k of them they have come 1 − 0.99^k of the way
Loss                cross-entropy; FedAvg otherwise

Down: the weights of the global model, and γ. Up: the weights, and μ̄, σ̄ of each stage. Stays:
nothing but the data.

Deviations: stages are found by the sizes of maps (`protofl_common/models/augmentation.py`); the
authors write layers into their networks. Variances are over B and over pixels, not B − 1, so a
batch of one sample stays as it is. In the authors' code the averages go on from those of all
clients.
"""

from client_app.algorithms.base import Client
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.fedfa import FedFAHparams
from protofl_common.config.options import SettingsError
from protofl_common.models.augmentation import Augmentation


class FedFA(FedAvg[FedFAHparams]):
    """FedAvg of a network whose training augments the maps behind its stages."""

    def __init__(self, client: Client, round_number: int) -> None:
        super().__init__(client, round_number)
        augmentation = Augmentation(self.model.body, client.input_shape, self.hparams.probability)
        self.augmentation = augmentation.to(client.device)
        if not len(self.augmentation.averages):
            raise SettingsError(
                f"arch = {client.arch!r} has no convolution with maps of several pixels, "
                "whose statistics algo = 'fedfa' augments; choose another of the two"
            )
