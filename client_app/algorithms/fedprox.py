"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020), client half.

Other half: `server_app/strategies/fedavg.py`; the server is FedAvg's.
Symbols: w the client's parameters, w^t the global model that the round started from; μ = ``mu``.

Loss (Eq. 2)        h(w) = F(w) + (μ/2) · ‖w − w^t‖², with cross-entropy for F

Down: the weights of the global model. Up: those after local training. Stays: nothing but the data.

Deviations: every client trains ``local-epochs`` epochs; the paper lets slow ones do less (its
γ-inexact solutions). Buffers (batch-normalisation statistics) take no part in the norm.
"""

import torch

from client_app.algorithms.base import Batch, ClientView, LossTerms, Payload
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.fedprox import FedProxHparams


class FedProx(FedAvg[FedProxHparams]):
    """Cross-entropy plus the proximal term."""

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        self.needs_gradients = self.hparams.mu > 0

    def receive(self, payload: Payload) -> None:
        super().receive(payload)
        self.start = [parameter.detach().clone() for parameter in self.model.parameters()]

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and μ/2 times the squared distance to the received weights."""
        terms = super().loss(batch)
        if self.hparams.mu > 0:
            pairs = zip(self.model.parameters(), self.start, strict=True)
            squares = [(parameter - start).square().sum() for parameter, start in pairs]
            terms["proximal"] = self.hparams.mu / 2 * torch.stack(squares).sum()
        return terms
