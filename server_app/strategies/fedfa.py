"""FedFA, server half: FedAvg, and how far clients shift their features.

Zhou & Konukoglu, "Federated Feature Augmentation", ICLR 2023.
Other half: `client_app/algorithms/fedfa.py`.
Symbols: μ̄_m [C] client m's average of the channels' means in a stage, M clients.

Shared variance     Σ²_j = 1/M Σ_m (μ̄_m,j − mean over m)², of every channel j;
                    of the standard deviations likewise
Coefficients        γ_j = C · p_j / Σ_j' p_j',   p_j = 1 / (1 + 1 / Σ²_j);
                    1 at first, and where only one client replies

With ``liars`` as many of the smallest and of the largest μ̄_m,j are left out of every channel's
variance.
Deviations: the authors' code takes one variance over all channels and clients of a stage, so that γ
is 1 everywhere.
"""

import torch

from protofl_common.algorithms.fedfa import FedFAHparams
from protofl_common.maths.aggregation import Aggregator
from protofl_common.models.augmentation import Augmentation, fusion_coefficients
from server_app.strategies.base import Federation, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


class FedFA(FedAvg[FedFAHparams]):
    """Keeps the global model, and γ of every stage."""

    state = ("weights", "coefficients")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        augmentation = Augmentation(self.first_model().body, self.card.input_shape, 0.0)
        self.coefficients: StateDict = augmentation.coefficients.state_dict(prefix="coefficients.")
        self.averages: StateDict = augmentation.averages.state_dict(prefix="averages.")

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Average the weights, and compute γ of every stage from the clients' averages.

        As many of the largest and smallest averages as there may be liars are left out.
        """
        sent = [upload.weights("averages") for upload in uploads]
        without_liars = Aggregator("trimmed-mean", self.federation.bounds.liars)
        trim = without_liars.dropped_at_each_end(len(sent))

        for name in self.averages:  # Of means, or of standard deviations, in a stage
            means_MC = torch.stack([averages[name] for averages in sent])
            if trim:  # Each channel by itself
                means_MC = means_MC.sort(dim=0).values[trim : len(sent) - trim]
            coefficient = name.replace("averages", "coefficients", 1)
            self.coefficients[coefficient] = fusion_coefficients(means_MC)
        return super().merge(uploads)
