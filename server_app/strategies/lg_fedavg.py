"""LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020), server half: FedAvg of the heads.

Other half: `client_app/algorithms/lg_fedavg.py`.
g ← Σ_m (n_m / Σ n) · g_m over the round's clients; the authors' code averages plainly.
The clients' bodies are their own affair, and their code need not be here.
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
        head = initial_head(self.arch, self.num_classes, settings.model, settings.run.seed)
        return SplitModel(nn.Identity(), head)
