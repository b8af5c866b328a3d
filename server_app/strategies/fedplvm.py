"""FedPLVM (Wang et al., NeurIPS 2024), server half: FedAvg, and clusters of the clients' clusters.

FPL's too (Huang et al., CVPR 2023).
Other halves: `client_app/algorithms/fedplvm.py`, `client_app/algorithms/fpl.py`.
Symbols: P_k^m client k's local prototypes of class m; G^m the global ones, C_m many. FPL: c_m^k
client m's prototype of class k; P^k the cluster prototypes of the class, J many; U^k their mean.

Models              as FedAvg, weights N_k / N (Eq. 1)
Prototypes (Eq. 4)  G^m = cluster means (FINCH, cosine) of the prototypes of class m of all clients
FPL (Eq. 5)         P^k = cluster means (FINCH, cosine) of the c_m^k of all clients
    (Eq. 6)         U^k = mean of P^k, which the clients take themselves

``global-clusters = "none"`` sends all local prototypes to everybody (Table 4), ``"average"`` their
mean (Table 3).
Deviations: a class that nobody sent in a round retains its prototypes. ``merging`` may put a median
or trimmed mean in the place of FedAvg's mean, and leave out the P_k^m of the clients least like the
others. Of FINCH's partitions FPL has the one with the fewest clusters, as in the authors' code.
With ``liars`` the bounds on samples act on how many P_k^m of a class a client has
(`server_app/protections/samples.py`), for they weigh it in the clusters' means.
"""

from protofl_common.algorithms.fedplvm import FedPLVMHparams
from protofl_common.maths.prototypes import cluster_classes
from server_app.strategies.base import Prototypes, Upload, vectors_of
from server_app.strategies.fedavg import FedAvg


class FedPLVM(FedAvg[FedPLVMHparams]):
    """Keeps the global model and the global prototypes; in the first round, no prototypes."""

    state = ("weights", "prototypes")

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Average the weights, and cluster the prototypes of all clients by class."""
        super().merge(uploads)
        local = Prototypes.joined(vectors_of(uploads).values())

        method = self.hparams.global_clusters
        merged = local
        if method != "none":
            count = self.hparams.kmeans_clusters  # Of a class, if the method is k-means
            merged = cluster_classes(local.means, local.labels, method, count)  # Eq. 4, or 5
        merged = merged.without_counts()
        if self.prototypes is not None:
            merged = merged.completed_by(self.prototypes)
        self.prototypes = merged
        return {"local-prototypes": float(len(local)), "global-prototypes": float(len(merged))}
