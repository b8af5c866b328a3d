"""FedAvg (McMahan et al., AISTATS 2017), server half: the mean of the clients' weights by training samples.

Other half: `client_app/algorithms/fedavg.py`.
w ← Σ_i (n_i / Σ n) · w_i over the round's clients, where n_i is client i's number of training samples.
Integer buffers (batch-normalisation counters) are averaged and rounded.
"""

from __future__ import annotations

import torch

from protofl_common.messages import Payload, Weights
from protofl_common.models import initial_model
from server_app.federation import Federation
from server_app.intake import Upload
from server_app.strategies.base import ServerStrategy


class FedAvg(ServerStrategy):
    """Keeps the global model; its first weights are drawn by the server."""

    keeps: tuple[str, ...] = ("weights",)

    def __init__(self, federation: Federation, run_name: str) -> None:
        super().__init__(federation, run_name)
        card = next(iter(federation.cards.values()))
        model = initial_model(
            card.arch, card.input_shape, self.num_classes, self.settings.model, self.settings.run.seed, owner="global"
        )
        self.weights: Weights = dict(model.state_dict())

    def payload_down(self) -> Payload:
        """The global model."""
        return Payload(weights=self.weights)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """The weighted mean of the clients' models, summed in float64."""
        total = sum(upload.train_samples for upload in uploads)
        for name, old in self.weights.items():
            mean = torch.zeros_like(old, dtype=torch.float64)
            for upload in uploads:
                assert upload.payload.weights is not None  # required of every upload
                mean += upload.payload.weights[name].double() * (upload.train_samples / total)
            self.weights[name] = (mean if old.is_floating_point() else mean.round()).to(old.dtype)
        return {}

    @property
    def global_weights(self) -> Weights:
        """The global model."""
        return self.weights
