"""FedPLVM (Wang et al., NeurIPS 2024), server half: FedAvg, and the clients' clusters clustered again per class.

FPL's too (Huang et al., CVPR 2023). Other halves: `client_app/algorithms/fedplvm.py`, `client_app/algorithms/fpl.py`.
Symbols: P_k^m client k's local prototypes of class m; G^m the global ones, C_m many. FPL: c_m^k client m's prototype of
class k; P^k the cluster prototypes of the class, J many; U^k their mean.

Models              as FedAvg, weights N_k / N (Eq. 1)
Prototypes (Eq. 4)  G^m = cluster means (FINCH, cosine) of the prototypes of class m of all clients
FPL (Eq. 5)         P^k = cluster means (FINCH, cosine) of the c_m^k of all clients
    (Eq. 6)         U^k = mean of P^k, which the clients take themselves

``global-clusters = "none"`` sends all local prototypes to everybody (Table 4), ``"average"`` their mean (Table 3).
Deviations: a class that nobody sent in a round retains its prototypes. ``merging`` may put a median or trimmed mean in
the place of FedAvg's mean, and leave out the P_k^m of the clients least like the others. Of FINCH's partitions FPL has
the one with the fewest clusters, as in the authors' code. With ``liars`` the bounds on samples act on how many
P_k^m of a class a client has (`protections/uploads.py`), for they weigh it in the clusters' means.
"""

from protofl_common.experiment.catalog import FedPLVMHparams
from protofl_common.maths.prototypes import cluster_classes
from server_app.protections.uploads import most_samples
from server_app.strategies.base import Prototypes, Upload, together, vectors_of
from server_app.strategies.fedavg import FedAvg


class FedPLVM(FedAvg[FedPLVMHparams]):
    """Keeps the global model and the global prototypes; in the first round there are none of these."""

    state: tuple[str, ...] = ("weights", "prototypes")

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        super().merge(uploads)
        means_PD, labels_P = together(self._bounded(uploads))
        merged, method = Prototypes(means_PD, labels_P), self.hparams.global_clusters
        if method != "none":
            merged = cluster_classes(means_PD, labels_P, method, self.hparams.kmeans_clusters).without_counts()
        self.prototypes = merged if self.prototypes is None else merged.completed_by(self.prototypes)
        return {"local-prototypes": float(len(labels_P)), "global-prototypes": float(len(self.prototypes))}

    def _bounded(self, uploads: list[Upload]) -> list[Upload]:
        bounds, sent = self.federation.bounds, vectors_of(uploads)
        for label in range(self.num_classes if bounds.liars else 0):
            of_class = {site: each.only(each.labels == label) for site, each in sent.items()}
            numbers = [len(each) for each in of_class.values() if len(each)]
            most, why = most_samples(numbers or [1], bounds)
            for site in [site for site, each in of_class.items() if len(each) > most]:
                others = sent[site].only(sent[site].labels != label)
                sent[site] = Prototypes.joined([others, of_class[site].thinned(most)])
                self.reduced.add(f"{site}: {len(of_class[site])} prototypes of a class count as {most:g} ({why})")
        return [upload.having(prototypes=sent[upload.site]) for upload in uploads]
