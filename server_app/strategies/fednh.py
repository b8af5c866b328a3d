"""FedNH (Dai et al., AAAI 2023), server half: FedAvg, and prototypes of the clients' means.

Other half: `client_app/algorithms/fednh.py`.
Symbols: W_c the prototype of class c; μ_i^c client i's mean of class c, made of n_i^c samples;
s the scale of the logits; ρ = ``smoothing``.

First               the W_c are spread evenly over the sphere: orthogonal where C ≤ D
                    (`models/split.py`)
Bodies and s        as FedAvg
Prototypes          μ^c = Σ_i n_i^c · μ_i^c / ‖μ_i^c‖
                    W_c ← V_c / ‖V_c‖, where V_c = ρ W_c + (1 − ρ) μ^c / ‖μ^c‖
``merging`` may put a median or trimmed mean in the place of μ^c, and of FedAvg's mean.

Deviations: the authors' code averages the bodies of a round without regard to their samples, and
refuses C > D > 2. A class that nobody sent retains its prototype.
"""

from dataclasses import replace

import torch
from torch.nn.functional import normalize

from protofl_common.algorithms.fednh import FedNHHparams
from protofl_common.models.devices import seeded
from protofl_common.models.split import CosineHead, HiddenHead, SplitModel, class_directions
from server_app.strategies.base import (
    Federation,
    FederationError,
    Prototypes,
    Upload,
    vectors_of,
)
from server_app.strategies.fedavg import FedAvg


class FedNH(FedAvg[FedNHHparams]):
    """Keeps the body and a prototype of every class, which it draws itself."""

    state = ("weights", "prototypes_CD")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        with seeded(self.seed):
            self.prototypes_CD = class_directions(self.num_classes, self.settings.model.feature_dim)
        # These share the memory of `prototypes_CD`
        self.prototypes = Prototypes(self.prototypes_CD, torch.arange(self.num_classes))

    def first_model(self) -> SplitModel:
        """Build the shared model, with a cosine head; FederationError for a head of two layers."""
        model = super().first_model()
        if isinstance(model.head, HiddenHead):
            raise FederationError(
                f"fednh needs heads of one layer, and that of {self.arch} has two"
            )
        head = CosineHead(self.num_classes, self.settings.model.feature_dim, self.hparams.scale)
        return SplitModel(model.body, head)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Update the W_c of the classes that were sent, and average the bodies as FedAvg."""
        sent = vectors_of(uploads)
        normalised = []
        for upload in uploads:
            means = sent[upload.site]
            units = replace(means, means=normalize(means.means, dim=1))  # μ_i^c / ‖μ_i^c‖
            normalised.append(upload.with_entries(prototypes=units))
        # μ^c divided by Σ_i n_i^c: only its direction counts below
        merged = self.merged(normalised, "counts", None)

        if merged is not None:
            rho = self.hparams.smoothing
            previous_PD = self.prototypes_CD[merged.labels]
            moved_PD = rho * previous_PD + (1 - rho) * normalize(merged.means, dim=1)  # V_c
            self.prototypes_CD[merged.labels] = normalize(moved_PD, dim=1)
        return super().merge(uploads)
