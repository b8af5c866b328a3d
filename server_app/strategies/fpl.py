"""FPL (Huang et al., CVPR 2023), server half: FedAvg, and the clients' prototypes clustered per class.

Other half: `client_app/algorithms/fpl.py`.
Symbols: c_m^k client m's prototype of class k; P^k the cluster prototypes of the class, J many; U^k their mean.

Models              as FedAvg, weights |D_m| / |D|
Clusters (Eq. 5)    P^k = cluster means (FINCH, cosine) of the c_m^k of all clients
Unbiased (Eq. 6)    U^k = mean of P^k, which the clients take themselves

Deviations: of FINCH's partitions it is the one with the fewest clusters, as in the authors' code. A class that nobody
sent in a round retains its prototypes.
"""

from torch import Tensor

from protofl_common.maths.prototypes import Prototypes, cluster_classes
from server_app.strategies.fedplvm import FedPLVM


class FPL(FedPLVM):
    """FedPLVM's server, which always takes FINCH."""

    def clustered(self, means_PD: Tensor, labels_P: Tensor) -> Prototypes:
        return cluster_classes(means_PD, labels_P, "finch").without_counts()
