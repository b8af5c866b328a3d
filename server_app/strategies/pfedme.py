"""pFedMe (Dinh et al., NeurIPS 2020), server half: a step towards, or beyond, the clients' mean.

Other half: `client_app/algorithms/pfedme.py`.
Symbols: w the global model, w_i client i's; β = ``beta``.

Global model (Alg. 1)   w ← (1 − β) w + β · mean_i w_i

Deviations: the mean is FedAvg's, weighted by training samples as in the authors' code; the paper's
is plain. Buffers (batch-normalisation statistics) are averaged without β, which could make a
variance negative.
"""

import torch

from protofl_common.algorithms.pfedme import PFedMeHparams
from server_app.strategies.base import Upload
from server_app.strategies.fedavg import FedAvg


class PFedMe(FedAvg[PFedMeHparams]):
    """FedAvg with a step size."""

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Move the parameters by β towards the clients' mean; buffers become the mean."""
        before = self.weights
        self.weights = self.averaged(uploads)
        for name in self.parameters:
            self.weights[name] = torch.lerp(before[name], self.weights[name], self.hparams.beta)
        return {}
