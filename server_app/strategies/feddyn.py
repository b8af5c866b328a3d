"""FedDyn (Acar et al., ICLR 2021), server half: beyond the mean of the clients' models.

Other half: `client_app/algorithms/feddyn.py`.
Symbols: θ^t the global model, θ_k client k's; P the round's clients of m; h the server's state, 0
at first; α = ``alpha``.

State (Alg. 1)      h ← h − (α/m) Σ_{k ∈ P} (θ_k − θ^t), so that h is the mean of the m clients' g_k
Model               θ^{t+1} = (1/|P|) Σ_{k ∈ P} θ_k − h / α

Every client weighs alike, as in the paper; ``merging`` may put a median or trimmed mean in place of
the mean, and ``max-update-ratio`` bound each θ_k − θ^t before. The next message says which change
of g_k counted, and to what part. If m has changed, h is scaled to it first. Buffers
(batch-normalisation statistics) are averaged, without h.
"""

import torch

from protofl_common.algorithms.feddyn import FedDynHparams
from server_app.strategies.base import Federation, Upload
from server_app.strategies.scaffold import KeepsMeanVariate, weighed_alike


class FedDyn(KeepsMeanVariate[FedDynHparams]):
    """Keeps the global model, and h as `control`, by the parameters' names."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.control = {name: torch.zeros_like(self.weights[name]) for name in self.parameters}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Update h, and set the global model to the plain mean of the θ_k minus h / α."""
        alpha = self.hparams.alpha
        mean = self.averaged(weighed_alike(uploads))
        change = {name: -alpha * (mean[name] - self.weights[name]) for name in self.parameters}
        self.add_to_control(change, len(uploads))
        for name, h in self.control.items():
            mean[name] = mean[name] - h / alpha
        self.weights = mean
        return {}

    def used_fraction(self, upload: Upload) -> float:
        """Return the fraction of θ_k − θ^t that is left, where it was cut."""
        return upload.kept_fractions.get("weights", 1.0)
