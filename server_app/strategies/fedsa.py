"""FedSA (Zhou et al., AAAI 2025), server half: random anchors, which hardly follow the prototypes.

Other half: `client_app/algorithms/fedsa.py`.
Symbols: A^c ∈ R^D the semantic anchor of class c; P_i^c client i's prototype of class c, and P̄^c
their mean; α = ``smoothing``.

First               A = h(R), R ~ N(0, 1) [C, D], h two layers FC(D, D) → BN → ReLU with random
                    weights, used once
Prototypes          P̄^c = mean over the clients that hold c of P_i^c
Anchors             A^c ← α A^c + (1 − α) P̄^c
``merging`` may put a median or trimmed mean in the place of P̄^c.

Deviations: the equations are those of the authors' code. A class that nobody sent retains its
anchor and prototype.
"""

import torch
from torch import nn

from protofl_common.algorithms.fedsa import FedSAHparams
from protofl_common.models.devices import seeded
from server_app.strategies.base import Federation, Prototypes, ServerStrategy, Upload


class FedSA(ServerStrategy[FedSAHparams]):
    """Keeps an anchor of every class, and global prototypes; in the first round, no prototypes."""

    state = ("anchors_CD", "prototypes")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        dim = self.settings.model.feature_dim
        with seeded(self.seed), torch.no_grad():
            layers: list[nn.Module] = []
            for _ in range(2):
                layers += [nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU()]
            self.anchors_CD = nn.Sequential(*layers)(torch.randn(self.num_classes, dim))
        # These share the memory of `anchors_CD`
        self.anchors = Prototypes(self.anchors_CD, torch.arange(self.num_classes))

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Move the anchors of the classes that were sent a little towards P̄, and keep P̄."""
        means = self.merged(uploads, "uniform", None)  # P̄ of the classes sent in this round
        if means is not None:
            previous_PD = self.anchors_CD[means.labels]
            # lerp by α gives (1 − α) P̄ + α A
            self.anchors_CD[means.labels] = means.means.lerp(previous_PD, self.hparams.smoothing)
        # now with the former P̄ of classes that nobody sent
        self.prototypes = self.merged(uploads, "uniform", self.prototypes)
        return {}
