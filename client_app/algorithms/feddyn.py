"""FedDyn, client half: a regulariser that changes with every round of the client.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.
Other half: `server_app/strategies/feddyn.py`.
Symbols: θ^t the global model; θ_k this client's; L_k its cross-entropy; g_k its gradient of the
round before, 0 at first; α = ``alpha``.

Loss (Eq. 1)        L_k(θ) − ⟨g_k, θ⟩ + (α/2) · ‖θ − θ^t‖², from θ = θ^t
Gradient            g_k ← g_k − α (θ_k − θ^t), which is ∇L_k(θ_k) where the loss is at its minimum

Down: θ^t. Up: θ_k. Stays: g_k, and its change, which is added to g_k once the server says that it
counted.

Deviations: a client trains ``local-epochs`` epochs, not to the minimum. The two terms act on the
gradient of each step, so the loss that is reported is L_k. The authors' code divides α by a
client's share of the samples and cuts gradients to the length 10; PFLlib's takes the distance to
θ^t in place of its square. Buffers (batch-normalisation statistics) take no part.
"""

from client_app.algorithms.scaffold import KeepsVariate
from protofl_common.algorithms.feddyn import FedDynHparams
from protofl_common.models.split import gradient_changes


class FedDyn(KeepsVariate[FedDynHparams]):
    """FedAvg whose steps are corrected: ``own`` is g_k, and ``change`` that of the round."""

    def fit(self) -> dict[str, float]:
        """Train by Eq. 1, and set `change` to −α (θ_k − θ^t); return the mean of each loss term.

        θ^t are the weights as received (``start``), and θ_k those after training. Each step's
        gradient is corrected by α (θ − θ^t) − g_k, the gradient of the two terms that Eq. 1 adds.
        """
        alpha = self.hparams.alpha
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        start = [parameter.detach().clone() for parameter in trained]

        def corrected() -> None:
            for parameter, own, received in zip(trained, self.own, start, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(alpha * (parameter - received) - own)

        losses = self.train(self.step(corrected))
        changes = self.privacy.post_processed(gradient_changes, trained, start, alpha)
        for change, new in zip(self.change, changes, strict=True):
            change.copy_(new)
        return losses
