"""FedDAP, client half: features drawn to the prototypes of their domain, and told from others'.

Source: Le et al., "FedDAP: Domain-Aware Prototype Learning for Federated Learning under Domain
Shift", CVPR 2026; equations are those of the authors' code.
Other half: `server_app/strategies/feddap.py`.
Symbols: z = f(x) [D] features; g^{y,d} the global prototype of class y in this client's domain d,
`global_table`; O the prototypes of all other domains, ``others``, of which O^y are of class y;
λ_1 = ``lambda1``, λ_2 = ``lambda2``, τ = ``temperature``.

Loss        L = L_CE + λ_1 · L_DPA + λ_2 · L_CPCL, averaged over the batch
            L_DPA = 1 − cos(z, g^{y,d})
            L_CPCL = −log [ Σ_{o ∈ O^y} exp(cos(z, o)/τ) / Σ_{o ∈ O} exp(cos(z, o)/τ) ]
Upload      the mean of f(x) over this client's training samples of each class, after training
Inference   the classifier; the nearest prototype of the client's domain in L2 is reported beside it

Down: weights, the prototypes of the client's domain, and those of the others. Up: weights and class
means, never how many samples stand behind them. Stays: nothing but the data.

Deviations: the authors' code takes class means from the features of the last epoch while it trains,
with Laplacian noise (``prototype-noise``). A sample without a prototype of its class counts 0. In
the first round, and L_CPCL where all clients are of one domain, a term is left out.
"""

from client_app.algorithms.base import Batch, LossTerms, Payload, Prototypes
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.feddap import FedDAPHparams
from protofl_common.maths.losses import angular_alignment, sparse_contrast, sparse_similarity


class FedDAP(FedAvg[FedDAPHparams]):
    """Cross-entropy, alignment within the domain, contrast across domains."""

    others: Prototypes | None = None

    def receive(self, payload: Payload) -> None:
        super().receive(payload)
        others = payload.vectors("others")
        if others is not None:
            self.others = others.to(self.client.device)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and λ_1 times the alignment with the own domain's prototypes.

        The third term is λ_2 times the contrast among other domains' prototypes: those of the
        sample's class against all. A term is left out while there are no prototypes for it.
        """
        terms = super().loss(batch)
        hparams = self.hparams
        z_MD, classes_M = self.task.assigned(batch.features, batch.labels)
        if self.global_prototypes is not None and hparams.lambda1 > 0:
            alignment = angular_alignment(z_MD, classes_M, *self.global_table)
            terms["alignment"] = hparams.lambda1 * alignment
        if self.others is not None and hparams.lambda2 > 0:
            # α = 1 makes the similarity the plain cosine, of which −1 is the least
            cosine_MG = sparse_similarity(z_MD, self.others.means, alpha=1.0, floor=-1.0)
            same_class_MG = classes_M.unsqueeze(1) == self.others.labels
            contrast = sparse_contrast(cosine_MG, same_class_MG, hparams.temperature)
            terms["contrast"] = hparams.lambda2 * contrast
        return terms
