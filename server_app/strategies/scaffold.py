"""SCAFFOLD (Karimireddy et al., ICML 2020), server half: the mean of the models, and of the changes of the variates.

Other half: `client_app/algorithms/scaffold.py`.
Symbols: x the global model; c the server's control variate; S the round's clients of N; η_g = ``server-lr``.

Model (Eq. 5)       x ← x + (η_g / |S|) Σ_{i ∈ S} (y_i − x)
Variate (Eq. 5)     c ← c + (1/N) Σ_{i ∈ S} Δc_i

Every client weighs alike, as in the paper; ``merging`` may put a median or trimmed mean in place of both means, and
``max-update-ratio`` bound each y_i − x and Δc_i.
Buffers (batch-normalisation statistics) are averaged and have no variate.
"""

from dataclasses import replace

import torch

from protofl_common.experiment.catalog import SCAFFOLDHparams
from protofl_common.maths.aggregation import merge_weights
from protofl_common.models.split import control_variate
from server_app.strategies.base import Federation, Upload
from server_app.strategies.fedavg import FedAvg


class SCAFFOLD(FedAvg[SCAFFOLDHparams]):
    """Keeps the global model and c."""

    state: tuple[str, ...] = ("weights", "control")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.control = dict(control_variate(self.first_model()).state_dict())

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        mean = self.averaged([replace(upload, most=1) for upload in uploads])
        for name, before in self.weights.items():
            if before.is_floating_point():
                mean[name] = before + self.hparams.server_lr * (mean[name] - before)
        zeros = {name: torch.zeros_like(value) for name, value in self.control.items()}
        changes = self.cut(uploads, [upload.payload.weights("control") or {} for upload in uploads], lambda _: zeros)
        change = merge_weights(changes, [1 / len(changes)] * len(changes), *self.federation.bounds.weights)
        part = len(changes) / (len(self.federation.cards) - len(self.federation.new_clients))
        self.weights = mean
        self.control = {name: value + part * change[name] for name, value in self.control.items()}
        return {}
