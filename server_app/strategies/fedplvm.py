"""FedPLVM (Wang et al., NeurIPS 2024), server half: FedAvg, and the clients' clusters clustered again per class.

Other half: `client_app/algorithms/fedplvm.py`.
Symbols: P_k^m client k's local prototypes of class m; G^m the global ones, C_m many.

Models              as FedAvg, weights N_k / N (Eq. 1)
Prototypes (Eq. 4)  G^m = cluster means (FINCH, cosine) of the prototypes of class m of all clients

``global-clusters = "none"`` sends all local prototypes to everybody (Table 4), ``"average"`` their mean (Table 3).
Deviations: a class that nobody sent in a round retains its prototypes. ``merging`` may put a median or trimmed mean in
the place of FedAvg's mean, and leave out the P_k^m of the clients least like the others.
"""

from torch import Tensor

from protofl_common.experiment.catalog import FedPLVMHparams
from protofl_common.maths.prototypes import cluster_classes
from server_app.strategies.base import Prototypes, Upload, together
from server_app.strategies.fedavg import FedAvg


class FedPLVM(FedAvg[FedPLVMHparams]):
    """Keeps the global model and the global prototypes; in the first round there are none of these."""

    state: tuple[str, ...] = ("weights", "prototypes")

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        super().merge(uploads)
        means, labels = together(uploads)
        merged = self.clustered(means, labels)
        self.prototypes = merged if self.prototypes is None else merged.completed_by(self.prototypes)
        return {"local-prototypes": float(len(labels)), "global-prototypes": float(len(self.prototypes))}

    def clustered(self, means_PD: Tensor, labels_P: Tensor) -> Prototypes:
        method = self.hparams.global_clusters
        if method == "none":
            return Prototypes(means_PD, labels_P)
        return cluster_classes(means_PD, labels_P, method, self.hparams.kmeans_clusters).without_counts()
