"""FedSA (Zhou et al., AAAI 2025), server half: semantic anchors, drawn at random, that hardly follow the prototypes.

Other half: `client_app/algorithms/fedsa.py`.
Symbols: A^c ∈ R^D the anchor of class c; P̄^c the mean of the round's client prototypes of class c; α = ``smoothing``.

First               A = h(R), R ~ N(0, 1) [C, D], h two layers FC(D, D) → BN → ReLU with random weights, used once
Prototypes          P̄^c = mean over the clients that hold c of P_i^c
Anchors             A^c ← α A^c + (1 − α) P̄^c
``merging`` may put a median or trimmed mean in the place of P̄^c.

Deviations: the equations are those of the authors' code. A class that nobody sent retains its anchor and prototype.
"""

import torch
from torch import nn

from protofl_common.basics.devices import seeded
from protofl_common.experiment.catalog import FedSAHparams
from server_app.strategies.base import Federation, Prototypes, ServerStrategy, Upload


class FedSA(ServerStrategy[FedSAHparams]):
    """Keeps an anchor of every class, and the global prototypes, of which there are none in the first round."""

    state: tuple[str, ...] = ("anchors_CD", "prototypes")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        dim, classes = self.settings.model.feature_dim, self.num_classes
        with seeded(self.seed), torch.no_grad():
            layers = [layer for _ in range(2) for layer in (nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU())]
            self.anchors_CD = nn.Sequential(*layers)(torch.randn(classes, dim))
        self.anchors = Prototypes(self.anchors_CD, torch.arange(classes))  # the same memory

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        if (means := self.merged(uploads, "uniform", None)) is not None:
            self.anchors_CD[means.labels] = means.means.lerp(self.anchors_CD[means.labels], self.hparams.smoothing)
        self.prototypes = self.merged(uploads, "uniform", self.prototypes)
        return {}
