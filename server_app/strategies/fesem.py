"""FeSEM, server half: K global models, each of similar clients.

Xie et al., "Multi-Center Federated Learning", 2020.
Other half: `client_app/algorithms/fedavg.py`; a client trains whatever model it receives.
Symbols: w_i client i's parameters after local training, n_i its samples; c_k the centres, K =
``centres``; r_i the cluster of client i.

E-step              r_i = argmin_k ‖w_i − c_k‖²
M-step              c_k = Σ_{i: r_i = k} n_i w_i / Σ_{i: r_i = k} n_i
Down                c_{r_i}, to each client its own

Deviations: all clients begin with one model, which as K equal centres would put everybody into the
first cluster for ever; so the first round's clusters are K-means of its parameters. Distances are
of parameters, without buffers. A cluster that no client of the round belongs to retains its centre;
a client that has not trained yet gets the first one. A client starts each round at its centre, so
it changes its cluster only if a round of training takes it more than half of the way to another
one: in no run that was looked at. The authors' code clusters by K-means again.
"""

import numpy as np
import torch
from sklearn.cluster import KMeans

from protofl_common.algorithms.fesem import FeSEMHparams
from server_app.strategies.base import Federation, Payload, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


class FeSEM(FedAvg[FeSEMHparams]):
    """Keeps the centres and the cluster of every client that has trained."""

    state = ("centres", "cluster_of")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.centres: dict[str, StateDict] = {}
        for k in range(self.hparams.centres):
            self.centres[str(k)] = {name: value.clone() for name, value in self.weights.items()}
        self.cluster_of: dict[str, torch.Tensor] = {}

    def value_of(self, name: str) -> StateDict:
        """Return the first centre, for clients that have not trained yet; all have its shapes."""
        return self.centres["0"]

    def payload_for(self, site: str, common: Payload) -> Payload:
        """Return the centre of the site's cluster, c_{r_i}."""
        cluster = self.cluster_of.get(site, torch.tensor(0))
        return Payload(weights=self.centres[str(int(cluster))])

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Assign each client to a cluster, and average the weights within each cluster."""
        # E-step
        sent = [upload.weights() for upload in uploads]
        vectors = np.stack([self._vector(weights) for weights in sent])
        clusters = self._nearest(vectors) if self.cluster_of else self._first_clusters(vectors)
        members: dict[int, list[Upload]] = {k: [] for k in sorted(set(clusters))}
        for upload, k in zip(uploads, clusters, strict=True):
            members[k].append(upload)

        # M-step
        for k, cluster in members.items():
            self.centres[str(k)] = self.averaged(cluster)
        for upload, k in zip(uploads, clusters, strict=True):
            self.cluster_of[upload.site] = torch.tensor(k)
        return {"clusters": float(len(members))}

    def _vector(self, weights: StateDict) -> np.ndarray:
        return torch.cat([weights[name].flatten() for name in self.parameters]).numpy()

    def _nearest(self, vectors: np.ndarray) -> list[int]:
        """Return r_i = argmin_k ‖w_i − c_k‖² of each client."""
        distances = []  # K rows of ‖w_i − c_k‖²
        for k in range(self.hparams.centres):  # not by `items`, which a checkpoint may reorder
            centre = self._vector(self.centres[str(k)])
            distances.append(np.square(vectors - centre).sum(axis=1))
        return [int(k) for k in np.argmin(distances, axis=0)]

    def _first_clusters(self, vectors: np.ndarray) -> list[int]:
        """Return each client's cluster by K-means, in no more clusters than distinct vectors."""
        distinct = {vector.tobytes() for vector in vectors}
        count = min(len(self.centres), len(distinct))
        k_means = KMeans(count, n_init=10, random_state=self.seed % 2**32)  # takes 32 bits only
        return [int(k) for k in k_means.fit_predict(vectors)]

    @property
    def global_weights(self) -> StateDict:
        """The weights of all centres, each under the name ``<k>/<name>``."""
        weights = {}
        for k, centre in self.centres.items():
            for name, value in centre.items():
                weights[f"{k}/{name}"] = value
        return weights
