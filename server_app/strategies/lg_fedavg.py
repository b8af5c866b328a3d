"""LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020), server half: FedAvg of the heads.

Other half: `client_app/algorithms/base.py`; a client trains body and head by cross-entropy, and sends the head.
Symbols: ℓ_m the body of client m, x → features, of any architecture; g the global head, features → logits.

Heads               g ← Σ_m (n_m / Σ n) · g_m over the round's clients; ℓ_m stays at client m
Evaluation          of ℓ_m under g as it came down, before it trains

Deviations: the authors' code averages plainly, and starts all clients from a model that FedAvg has trained.
"""

from torch import nn

from protofl_common.models.build import initial_head
from protofl_common.models.split import SplitModel
from server_app.strategies.base import H
from server_app.strategies.fedavg import FedAvg


class LGFedAvg(FedAvg[H]):
    """Keeps the global head; all heads have one shape, or the sites do not fit together."""

    def first_model(self) -> SplitModel:
        settings = self.settings
        return SplitModel(nn.Identity(), initial_head(self.arch, self.num_classes, settings.model, settings.run.seed))
