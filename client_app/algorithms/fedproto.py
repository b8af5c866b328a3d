"""FedProto (Tan et al., AAAI 2022), client half: learn locally, with features held near the global prototypes.

Other half: `server_app/strategies/fedproto.py`.
Symbols: C̄ = `global_CD` [C, D] global prototypes, `held_C` which classes have one; z = `features_BD`; λ = `lambda`.

Loss (Eq. 5, 6)     L = L_S(g(z), y) + λ · Σ_j d(C_i^(j), C̄^(j)), with cross-entropy for L_S
Upload (Eq. 1)      C_i^(j) = mean of f(x) over this client's training samples of class j, after training
Inference (Eq. 2)   the label of the nearest global prototype in L2; the head's prediction is reported beside it

Down: global prototypes. Up: local prototypes and how many samples stand behind each. Stays: model and optimizer.

Deviations: the mean of Eq. 1 over all data cannot be differentiated batch by batch. ``granularity = "class"`` takes
C_i^(j) of Eq. 6 over the batch; ``"sample"`` (default; the authors' code, with ``distance = "mse"``) takes every
sample's feature. Eq. 6 by the letter (``"class"``, ``"l2"``) overpowers the cross-entropy at λ = 1: ALGORITHMS.md.
The first round has no global prototypes, and so no second term.

Few labels (``positive-rate`` below 1; our text, Section 5.4): both terms, and the prototypes, are of the labelled
samples alone; the unlabelled ones have FedPU's term of weight ``pu-weight`` (`ClientAlgorithm.batch_loss`).
"""

from __future__ import annotations

from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from client_app.training import LossTerms
from protofl_common.losses import prototype_alignment
from protofl_common.messages import Payload
from protofl_common.prototypes import by_class


class FedProto(ClientAlgorithm):
    """Cross-entropy plus λ times the distance to the global prototypes."""

    def receive(self, payload: Payload) -> None:
        """Keep the global prototypes, which also predict (Eq. 2), and a table of them by class."""
        super().receive(payload)
        if self.global_prototypes is not None:
            self.global_CD, self.held_C = by_class(self.global_prototypes, self.site.num_classes)

    def loss(self, features_BD: Tensor, logits_BC: Tensor, labels_B: Tensor) -> LossTerms:
        """Eq. 5; the second term is λ · L_R."""
        terms = super().loss(features_BD, logits_BC, labels_B)
        if self.global_prototypes is not None and self.settings.lambda_ > 0:
            apart = prototype_alignment(
                features_BD,
                labels_B,
                self.global_CD,
                self.held_C,
                self.settings.distance,
                self.settings.granularity,
            )
            terms["prototype"] = self.settings.lambda_ * apart
        return terms

    def upload(self) -> Payload:
        """The local prototypes (Eq. 1), from one pass over the training data after training."""
        return Payload(prototypes=self.local_prototypes())
