"""FedFA (Zhou & Konukoglu, "Federated Feature Augmentation", ICLR 2023), server half: FedAvg, and how far to shift.

Other half: `client_app/algorithms/fedfa.py`.
Symbols: μ̄_m [C] client m's average of the channels' means in a stage, M clients.

Shared variance     Σ²_j = 1/M Σ_m (μ̄_m,j − mean over m)², of every channel j; of the standard deviations likewise
Coefficients        γ_j = C · p_j / Σ_j' p_j',   p_j = 1 / (1 + 1 / Σ²_j); 1 at first, and where only one client replies

With ``liars`` as many of the smallest and of the largest μ̄_m,j are left out of every channel's variance.
Deviations: the authors' code takes one variance over all channels and clients of a stage, so that γ is 1 everywhere.
"""

import torch

from protofl_common.experiment.catalog import FedFAHparams
from protofl_common.maths.aggregation import dropped
from protofl_common.models.augmentation import Augmentation, fusion_coefficients
from server_app.strategies.base import Federation, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


class FedFA(FedAvg[FedFAHparams]):
    """Keeps the global model, and γ of every stage."""

    state: tuple[str, ...] = ("weights", "coefficients")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        augmentation = Augmentation(self.first_model().body, self.card.input_shape, 0.0)
        self.coefficients: StateDict = augmentation.coefficients.state_dict(prefix="coefficients.")
        self.averages: StateDict = augmentation.averages.state_dict(prefix="averages.")

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        sent = [averages for upload in uploads if (averages := upload.payload.weights("averages")) is not None]
        most = dropped(len(sent), "trimmed-mean", float(self.federation.bounds.liars))
        for name in self.averages:
            together_MC = torch.stack([averages[name] for averages in sent])
            together_MC = together_MC.sort(dim=0).values[most : len(sent) - most] if most else together_MC
            self.coefficients[name.replace("averages", "coefficients", 1)] = fusion_coefficients(together_MC)
        return super().merge(uploads)
