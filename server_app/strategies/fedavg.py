"""FedAvg (McMahan et al., AISTATS 2017), server half: the mean of the clients' weights by training samples.

Other half: `client_app/algorithms/fedavg.py`.
w ← Σ_i (n_i / Σ n) · w_i over the round's clients, where n_i is client i's number of training samples.
Integer buffers (batch-normalisation counters) are averaged and rounded.
"""

from __future__ import annotations

import torch

from protofl_common.models.initial import initial_model
from protofl_common.models.split import SplitModel
from protofl_common.wire.payloads import Payload, StateDict, part_of
from protofl_common.wire.schema import Weights
from server_app.network.membership import Federation, FederationError
from server_app.strategies.base import H, ServerStrategy
from server_app.validation.replies import Upload


class FedAvg(ServerStrategy[H]):
    """Keeps the global model, as far as the catalog's row shares it; its first weights are drawn by the server."""

    state: tuple[str, ...] = ("weights",)

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        model = self.first_model()
        entry = self.settings.exchange.up["weights"]
        assert isinstance(entry, Weights)
        self.weights: StateDict = part_of(model, entry)
        if not self.weights:
            shared = f"shares all but the last {entry.without_last} layers of a model"
            arch = next(iter(federation.cards.values())).arch
            raise FederationError(f"{self.settings.run.algo} {shared}, and {arch} has no more")

    def first_model(self) -> SplitModel:
        """The model of the first round, whose architecture all clients have."""
        card = next(iter(self.federation.cards.values()))
        settings = self.settings
        return initial_model(card.arch, card.input_shape, self.num_classes, settings.model, settings.run.seed, "global")

    def payload_down(self) -> Payload:
        """The global model."""
        return Payload(weights=self.weights)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """The weighted mean of the clients' models."""
        self.weights = weighted_mean(uploads)
        return {}

    @property
    def global_weights(self) -> StateDict:
        """The global model."""
        return self.weights


def weighted_mean(uploads: list[Upload]) -> StateDict:
    """Σ_i (n_i / Σ n) · w_i, summed in float64."""
    total = sum(upload.train_samples for upload in uploads)
    sent = [(weights, upload.train_samples / total) for upload in uploads if (weights := upload.payload.weights())]
    merged: StateDict = {}
    for name, one in sent[0][0].items():
        mean = torch.zeros_like(one, dtype=torch.float64)
        for weights, share in sent:
            mean += weights[name].double() * share
        merged[name] = (mean if one.is_floating_point() else mean.round()).to(one.dtype)
    return merged
