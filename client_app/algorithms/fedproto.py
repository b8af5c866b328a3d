"""FedProto, client half: learn locally, with features drawn to the global prototypes.

Source: Tan et al., AAAI 2022.
Other half: `server_app/strategies/fedproto.py`.
Symbols: C̄ global prototypes, `global_table` [C, D] with a mask [C] of the classes that have one;
z = `batch.features` [B, D]; λ = `lambda`.

Loss (Eq. 5, 6)     L = L_S(g(z), y) + λ · Σ_j d(C_i^(j), C̄^(j)), with cross-entropy for L_S
Upload (Eq. 1)      C_i^(j) = mean of f(x) over this client's training samples of class j,
                    after training
Inference (Eq. 2)   the label of the nearest global prototype in L2;
                    the head's prediction is reported beside it

Down: global prototypes. Up: local prototypes and how many samples stand behind each. Stays: the
model.

Deviations: the mean of Eq. 1 over all data cannot be differentiated batch by batch. ``granularity =
"class"`` takes C_i^(j) of Eq. 6 over the batch; ``"sample"`` (default; the authors' code, with
``distance = "mse"``) takes every sample's feature. Eq. 6 by the letter (``"class"``, ``"l2"``)
overpowers the cross-entropy at λ = 1 (docs/algorithms/fedproto.md). The first round has no global
prototypes, and so no second term.

Few labels (``positive-rate`` below 1; Section 5.4 of the reproduction report): both terms, and the
prototypes, are of the labelled samples alone; the unlabelled ones have FedPU's term of weight
``pu-weight`` (`client_app/algorithms/base.py`).
"""

from client_app.algorithms.base import Batch, ClientAlgorithm, LossTerms
from protofl_common.algorithms.base import AlignmentHparams
from protofl_common.maths.losses import prototype_alignment


class FedProto(ClientAlgorithm[AlignmentHparams]):
    """Cross-entropy plus λ times the distance to the global prototypes."""

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and λ times the distance of features to global prototypes.

        The second term is left out in the first round, which has no global prototypes yet.
        """
        terms = super().loss(batch)
        if self.global_prototypes is not None and self.hparams.lambda_ > 0:
            prototypes_CD, mask_C = self.global_table
            features_MD, classes_M = self.task.assigned(batch.features, batch.labels)
            distance = prototype_alignment(
                features_MD,
                classes_M,
                prototypes_CD,
                mask_C,
                self.hparams.distance,
                self.hparams.granularity,
            )
            terms["prototype"] = self.hparams.lambda_ * distance
        return terms
