"""FedPLVM, client half: FedAvg with several prototypes per class and α-sparse contrast.

Source: Wang et al., NeurIPS 2024.
Other half: `server_app/strategies/fedplvm.py`.
Symbols: G global prototypes, of which G^y are of class y, C_y many; z = h(x) features;
s_α(z, g) = cos(z, g)^α; τ = ``temperature``; P_k^m client k's local prototypes of class m, J_{k,m}
many; λ = ``lambda``.

Loss (Eq. 5, 10)    L = λ · (L_contra + L_corr) + L_CE
    (Eq. 6)         L_contra = −log [ Σ_{g ∈ G^y} exp(s_α(z, g)/τ) / Σ_{g ∈ G} exp(s_α(z, g)/τ) ]
    (Eq. 8)         L_corr = | Σ_{g ∈ G^y} s_α(z, g) − C_y |
Upload (Eq. 3)      P_k^m = cluster means (FINCH, cosine) of h(x)
                    over this client's samples of class m, after training
Inference           the classifier; the nearest prototype in L2 is reported beside it

Down: weights and G. Up: weights and all P_k^m, never how many samples stand behind them. Stays:
nothing but the data.

Deviations: all three losses are means over the batch. ``similarity-floor`` bounds the slope of s_α
near 0 (`maths/losses.py`). ``contrast``, ``correction``, ``local-clusters`` and ``kmeans-clusters``
are the paper's ablations (Tables 3, 5 and 9). ``correction = "mean"`` divides Eq. 8 by C_y, as the
paper's words for it have it ("average cosine similarity"); ``"centre"`` is the authors' code, 2
(cos(z, mean of G^y) − 1)², without α. The first round has no prototypes, and so only the
cross-entropy. A λ as large as the paper's 100 wants ``drop-last``: batch normalisation over a small
last batch upsets it (docs/algorithms).
"""

from client_app.algorithms.base import Batch, LossTerms, Prototypes
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.fedplvm import FedPLVMHparams
from protofl_common.maths import losses
from protofl_common.maths.prototypes import cluster_classes


class FedPLVM(FedAvg[FedPLVMHparams]):
    """Cross-entropy plus λ times the α-sparsity prototype loss; uploads clusters of features."""

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and λ times contrast and correction by the prototypes (Eq. 10).

        Only the cross-entropy before there are prototypes, or with λ = 0; the settings may leave
        out the contrast, and choose another correction or none.
        """
        terms = super().loss(batch)
        hparams = self.hparams
        if self.global_prototypes is None or hparams.lambda_ == 0:
            return terms

        z_MD, classes_M = self.task.assigned(batch.features, batch.labels)
        prototypes_GD = self.global_prototypes.means
        similarity_MG = losses.sparse_similarity(
            z_MD, prototypes_GD, hparams.alpha, hparams.similarity_floor
        )
        same_class_MG = classes_M.unsqueeze(1) == self.global_prototypes.labels
        if hparams.contrast:
            rivals_MG = self.task.rivals(classes_M, self.global_prototypes.labels)
            contrast = losses.sparse_contrast(
                similarity_MG, same_class_MG, hparams.temperature, rivals_MG
            )
            terms["contrast"] = hparams.lambda_ * contrast
        if hparams.correction == "none":
            return terms

        if hparams.correction == "centre":
            correction = losses.centre_correction(z_MD, prototypes_GD, same_class_MG)
        else:
            is_mean = hparams.correction == "mean"
            correction = losses.sparse_correction(similarity_MG, same_class_MG, mean=is_mean)
        terms["correction"] = hparams.lambda_ * correction
        return terms

    def local_prototypes(self) -> Prototypes:
        """Return the means of clusters of each class's features in the training data (Eq. 3)."""
        hparams = self.hparams
        data = self.client.train_set
        features_MD, classes_M = self.task.assigned(self.features(data), data.labels.cpu())
        return cluster_classes(
            features_MD, classes_M, hparams.local_clusters, hparams.kmeans_clusters
        )
