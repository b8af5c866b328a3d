"""FPL, client half: contrast with cluster prototypes, and a pull to their mean.

Source: Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR
2023.
Other half: `server_app/strategies/fedplvm.py`, which always takes FINCH.
Symbols: P the cluster prototypes, of which P^k are of class k; U^k their mean, the unbiased
prototype; z = f(x) [D] features; s(z, c) = cos(z, c) / τ, τ = ``temperature``.

Loss (Eq. 12)   L = L_CE + λ · (L_CPCL + L_UPCR), with λ = ``lambda`` = 1 in the paper
    (Eq. 8)     L_CPCL = −log [ Σ_{c ∈ P^y} exp s(z, c) / Σ_{c ∈ P} exp s(z, c) ]
    (Eq. 10)    L_UPCR = Σ_v (z_v − U_v^y)²     with ``consistency = "squared-l2"``
                the mean over v in its place    with ``"mse"`` (default; the authors' code)
Upload (Eq. 2)  c^k = mean of f(x) over this client's training samples of class k, after training
Inference       the classifier; the nearest prototype in L2 is reported beside it

Down: weights and P. Up: weights and all c^k, never how many samples stand behind them. Stays:
nothing but the data.

Deviations: both terms are means over the batch, in which samples without a prototype of their class
count 0. U follows from P, and is not sent. The authors' code takes c^k from the features of the
last epoch while it trains. The first round has no prototypes, and so only the cross-entropy.
"""

from client_app.algorithms.base import Batch, LossTerms, Payload, by_class
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.fpl import FPLHparams
from protofl_common.maths.losses import prototype_alignment, sparse_contrast, sparse_similarity
from protofl_common.maths.prototypes import class_means


class FPL(FedAvg[FPLHparams]):
    """Cross-entropy, contrast with all cluster prototypes, a pull to the unbiased of the class."""

    def receive(self, payload: Payload) -> None:
        """Take over the global model and the cluster prototypes.

        Also compute the mean of each class's clusters, the unbiased prototypes U (Eq. 6).
        """
        super().receive(payload)
        clusters = self.global_prototypes
        if clusters is not None:
            num_classes = self.client.num_classes
            unbiased = class_means(clusters.means, clusters.labels, num_classes)
            self.unbiased_CD, self.mask_C = by_class(unbiased.to(self.client.device), num_classes)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and λ times contrast and consistency (Eq. 12).

        The contrast is with all cluster prototypes, the consistency with the mean of those of the
        sample's class. Without prototypes, or with λ = 0, there is only the cross-entropy. The
        settings may leave out each of the other two terms.
        """
        terms = super().loss(batch)
        hparams = self.hparams
        clusters = self.global_prototypes
        if clusters is None or hparams.lambda_ == 0:
            return terms

        # M pairs of a sample and a class that it has: with one label a sample, M = B
        z_MD, classes_M = self.task.assigned(batch.features, batch.labels)
        if hparams.contrast:
            # α = 1 makes the similarity the plain cosine, of which −1 is the least
            cosine_MG = sparse_similarity(z_MD, clusters.means, alpha=1.0, floor=-1.0)
            same_class_MG = classes_M.unsqueeze(1) == clusters.labels
            rivals_MG = self.task.rivals(classes_M, clusters.labels)
            contrast = sparse_contrast(cosine_MG, same_class_MG, hparams.temperature, rivals_MG)
            terms["contrast"] = hparams.lambda_ * contrast
        if hparams.consistency != "none":
            consistency = prototype_alignment(
                z_MD,
                classes_M,
                self.unbiased_CD,  # U, a row for each class
                self.mask_C,  # the classes that have a U
                hparams.consistency,
                granularity="sample",
            )
            terms["consistency"] = hparams.lambda_ * consistency
        return terms
