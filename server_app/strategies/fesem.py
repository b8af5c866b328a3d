"""FeSEM (Xie et al., "Multi-Center Federated Learning", 2020), server half: K global models, each of similar clients.

Other half: `client_app/algorithms/fedavg.py`; a client trains whatever model it receives.
Symbols: w_i client i's parameters after local training, n_i its samples; c_k the centres, K = ``centres``; r_i.

E-step              r_i = argmin_k ‖w_i − c_k‖²
M-step              c_k = Σ_{i: r_i = k} n_i w_i / Σ_{i: r_i = k} n_i
Down                c_{r_i}, to each client its own

Deviations: all clients begin with one model, which as K equal centres would put everybody into the first cluster for
ever; so the first round's clusters are K-means of its parameters. Distances are of parameters, without buffers. A
cluster that no client of the round belongs to retains its centre; a client that has not trained yet gets the first one.
A client starts each round at its centre, so it changes its cluster only if a round of training takes it more than half
of the way to another one: in no run that was looked at. The authors' code clusters by K-means again.
"""

import numpy as np
import torch
from sklearn.cluster import KMeans

from protofl_common.experiment.catalog import FeSEMHparams
from server_app.strategies.base import Federation, Payload, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


class FeSEM(FedAvg[FeSEMHparams]):
    """Keeps the centres and the cluster of every client that has trained."""

    state: tuple[str, ...] = ("centres", "cluster_of")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        copies = ({name: value.clone() for name, value in self.weights.items()} for _ in range(self.hparams.centres))
        self.centres: dict[str, StateDict] = {str(k): copy for k, copy in enumerate(copies)}
        self.cluster_of: dict[str, torch.Tensor] = {}

    def entry(self, name: str) -> StateDict:
        """The weights for a client that has not trained yet, and what all are like."""
        return self.centres["0"]

    def payload_for(self, site: str, common: Payload) -> Payload:
        return Payload(weights=self.centres[str(int(self.cluster_of.get(site, torch.tensor(0))))])

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        near = self.cut(uploads, [upload.payload.weights() or {} for upload in uploads], self.starting_point)
        uploads = [upload.having(weights=dict(weights)) for upload, weights in zip(uploads, near, strict=True)]
        points = np.stack([self._vector(upload.payload.weights() or {}) for upload in uploads])
        clusters = self._nearest(points) if self.cluster_of else self._first_clusters(points)
        assigned = list(zip(uploads, clusters, strict=True))
        members = {k: [upload for upload, cluster in assigned if cluster == k] for k in sorted(set(clusters))}
        self.centres |= {str(k): self.averaged(members[k]) for k in members}
        self.cluster_of |= {upload.site: torch.tensor(k) for upload, k in assigned}
        return {"clusters": float(len(set(clusters)))}

    def _vector(self, weights: StateDict) -> np.ndarray:
        return torch.cat([weights[name].flatten() for name in self.parameters]).numpy()

    def _nearest(self, points: np.ndarray) -> list[int]:
        centres = [self.centres[str(k)] for k in range(self.hparams.centres)]  # a checkpoint may order them otherwise
        squares = [np.square(points - self._vector(centre)).sum(axis=1) for centre in centres]
        return [int(k) for k in np.argmin(squares, axis=0)]

    def _first_clusters(self, points: np.ndarray) -> list[int]:
        count = min(len(self.centres), len({point.tobytes() for point in points}))
        return [int(k) for k in KMeans(count, n_init=10, random_state=self.seed % 2**32).fit_predict(points)]

    @property
    def global_weights(self) -> StateDict:
        """All centres, as ``<k>/<name>``."""
        return {f"{k}/{name}": value for k, centre in self.centres.items() for name, value in centre.items()}
