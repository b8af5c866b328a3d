"""MPFT, client half: send class-wise cluster centres of frozen features once.

Source: Zhang et al., "Multi-Domain Prototype-Based Federated Fine-Tuning", ICLR 2025.
Other half: `server_app/strategies/mpft.py`.
Symbols: r(x) features of frozen backbones, side by side; n_c training samples of class c;
ρ = ``sample-ratio``.

Upload              the centres of ⌈ρ · n_c⌉ clusters of r(x) by k-means,
                    for each class c that it has
Inference           the adapter and classifier that the server has trained on all clients' centres

Down: adapter and classifier. Up: centres. Stays: the data; a client trains nothing.

Deviations: the adapter is the projection behind frozen backbones, and its classifier is trained
with it; the paper's is that of CLIP's text encoder. A centre of one sample is that sample's
features; the authors' random choice of samples and their noise are not there, nor their adaptation
of the adapter by each client. More rounds train on.
"""

from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.mpft import MPFTHparams
from protofl_common.maths.prototypes import Prototypes, cluster_classes


class MPFT(FedAvg[MPFTHparams]):
    """Takes in adapter and classifier as FedAvg does its model; sends a summary of its features."""

    def local_prototypes(self) -> Prototypes:
        """Return cluster centres of each class, in the space of the frozen features."""
        data = self.client.train_set
        features_MD, classes_M = self.task.assigned(data.in_memory.cpu(), data.labels.cpu())
        ratio = self.hparams.sample_ratio
        return cluster_classes(features_MD, classes_M, "kmeans", ratio=ratio)
