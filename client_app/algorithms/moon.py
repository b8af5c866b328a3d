"""MOON, client half: learn features like the global model's, and unlike one's own of before.

Source: Li et al., "Model-Contrastive Federated Learning", CVPR 2021.
Other half: `server_app/strategies/fedavg.py`; the server is FedAvg's.
Symbols: z [B, D] the features of the model that trains, z_glob those of the global model that the
round started from, z_prev those of this client's model after its last round; μ = ``mu``,
τ = ``temperature``.

Loss (Eq. 4)        L = L_CE + μ · L_con, averaged over the batch
    (Eq. 3)         L_con = −log [ e^{cos(z, z_glob)/τ}
                                   / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) ]

Down: the weights of the global model. Up: those after local training. Stays: the client's last
model.

Deviations: the paper compares the outputs of a projection, two layers that it puts between body and
head; here, as in PFLlib, the features themselves. In a client's first round nothing is contrasted.
The authors take the model's first weights for its last ones there, which in the first round of all
gives no gradient either. Both fixed models are in evaluation mode, as in the authors' code.
"""

from copy import deepcopy

import torch

from client_app.algorithms.base import Batch, ClientView, LossTerms, Payload
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.moon import MOONHparams
from protofl_common.maths.losses import model_contrast


class MOON(FedAvg[MOONHparams]):
    """Cross-entropy plus μ times the contrast of models."""

    state: tuple[str, ...] = ("previous",)

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        self.previous = deepcopy(self.model)

    def receive(self, payload: Payload) -> None:
        """Take over the global model, and keep a copy of it for the contrast."""
        super().receive(payload)
        self.received = deepcopy(self.model).eval()
        self.previous.eval()

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and μ times the contrast of the features with other models'.

        They are drawn to those of the global model, away from those of this client's last model.
        The contrast is left out in a client's first round, which has no last model.
        """
        terms = super().loss(batch)
        if self.last_round is None or self.hparams.mu == 0:
            return terms
        with torch.no_grad():
            received_BD = self.received.body(batch.inputs)
            previous_BD = self.previous.body(batch.inputs)
        contrast = model_contrast(
            batch.features, received_BD, previous_BD, self.hparams.temperature
        )
        terms["contrast"] = self.hparams.mu * contrast
        return terms

    def fit(self) -> dict[str, float]:
        losses = super().fit()
        self.previous.load_state_dict(self.model.state_dict())
        return losses
