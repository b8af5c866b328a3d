"""MOON: FedAvg that contrasts models.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021.

Symbols: z the features of the model that trains, z_glob those of the global model that the round
started from, z_prev those of this client's model after its last round; μ = ``mu``,
τ = ``temperature``.

Loss (Eq. 3, 4)     L = CE + μ · L_con
                    L_con = −log [ e^{cos(z, z_glob)/τ}
                                   / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) ]

Down and up: the weights of the model. Stays: the client's last model.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from client_app.algorithms.base import ClientView as Client
from client_app.algorithms.fedavg import FedAvg
from client_app.learning.training import Batch, LossTerms
from protofl_common.algorithms.base import Algorithm, Hparams
from protofl_common.config.options import option
from protofl_common.wire.payloads import Payload
from protofl_common.wire.schema import Exchange, Weights


@dataclass(frozen=True)
class MoonHparams(Hparams):
    """Given as ``hparams = "mu=1.0, temperature=0.5"``."""

    mu: float = option(default=1.0)
    temperature: float = option(default=0.5, above=0)


class Moon(FedAvg[MoonHparams]):
    """Cross-entropy plus the model contrast; nothing to contrast with in a client's first round."""

    state = ("previous",)

    def __init__(self, client: Client, round_number: int) -> None:
        super().__init__(client, round_number)
        self.previous = deepcopy(self.model)

    def receive(self, payload: Payload) -> None:
        """Become the global model, and keep a copy of it."""
        super().receive(payload)
        self.received = deepcopy(self.model)

    def loss(self, batch: Batch) -> LossTerms:
        """Eq. 4; its terms already weighted."""
        terms = super().loss(batch)
        if self.last_round is None:
            return terms
        with torch.no_grad():
            z_glob = self.received.eval().body(batch.inputs)
            z_prev = self.previous.eval().body(batch.inputs)
        to_global = cosine_similarity(batch.features, z_glob)
        to_previous = cosine_similarity(batch.features, z_prev)
        scores_B2 = torch.stack([to_global, to_previous], dim=1) / self.hparams.temperature
        l_con = cross_entropy(scores_B2, torch.zeros_like(batch.labels))
        terms["contrast"] = self.hparams.mu * l_con
        return terms

    def fit(self) -> dict[str, float]:
        """Train, and keep the model for the next round's contrast."""
        losses = super().fit()
        self.previous = deepcopy(self.model)
        return losses


ROW = Algorithm(
    title="MOON",
    paper="Li et al., CVPR 2021",
    client="outside_moon.method:Moon",
    server="server_app.strategies.fedavg:FedAvg",
    hparams=MoonHparams,
    exchange=Exchange(down={"weights": Weights()}, up={"weights": Weights()}),
    losses=("cross-entropy", "contrast"),
    supports=("merging", "secagg"),
)
