"""FedORGP, client half: align features with the global prototypes by angle.

Source: Guo et al., "… Orthogonality Regularization on Global Prototypes", 2025.
Other half: `server_app/strategies/fedorgp.py`.
Symbols: P̂^c the server's prototype of class c; z = f(x) features; λ = ``lambda``.

Loss                L = CE + λ · mean of (1 − cos(z, P̂^y)) over the batch
Upload              P_i^c = mean of z over this client's training samples of class c, after training
Inference           the label of the P̂^c of the largest cosine;
                    the head's prediction is reported beside it

Down: P̂. Up: local prototypes, *without* how many samples stand behind them. Stays: the model.

Deviations: the equations are those of the authors' code of November 2024 (aaaf664), which predicts
by the head. Since July 2025 it weighs both terms by similarity and leaves outliers out of the
means. The first round has no second term.
"""

from client_app.algorithms.base import Batch, ClientAlgorithm, LossTerms
from protofl_common.algorithms.fedorgp import FedORGPHparams
from protofl_common.maths.losses import angular_alignment


class FedORGP(ClientAlgorithm[FedORGPHparams]):
    """Cross-entropy plus λ times the angle to the global prototypes."""

    similarity = "cosine"

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy and, once there are global prototypes, λ times the angular term.

        That is the mean over the samples of 1 − the cosine to the prototype of their class.
        """
        terms = super().loss(batch)
        if self.global_prototypes is not None and self.hparams.lambda_ > 0:
            features_MD, classes_M = self.task.assigned(batch.features, batch.labels)
            distance = angular_alignment(features_MD, classes_M, *self.global_table)
            terms["prototype"] = self.hparams.lambda_ * distance
        return terms
