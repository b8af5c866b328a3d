"""FedKD (Wu et al., Nature Communications 2022), server half: the mean of the students' updates, cut by SVD again.

Other half: `client_app/algorithms/fedkd.py`.
Ā = Σ_i (n_i / Σ n) · A_i, cut as the clients cut theirs; w ← w + Ā. The server's student is what the clients make of
the updates that they are sent.

Deviations: a mean by samples, where the text has a plain one. A client that did not take part in the last merged round
does not have what Ā changes, and is sent the student w instead.
"""

import torch

from protofl_common.experiment.catalog import FedKDHparams
from protofl_common.maths.low_rank import applied, compressed, expanded
from server_app.strategies.base import Federation, Payload, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


class FedKD(FedAvg[FedKDHparams]):
    """Keeps the student, its last update, and which clients have the student from before that update."""

    state: tuple[str, ...] = ("weights", "update", "holders")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.update: StateDict = {}
        self.holders: dict[str, torch.Tensor] = {}

    def payload_down(self) -> Payload:
        return Payload(weights=self.weights)

    def payload_for(self, site: str, common: Payload) -> Payload:
        """The update for one that has what it changes; once asked, only a reply that counts says what a site has."""
        return common if self.holders.pop(site, None) is None else Payload(update=self.update)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """The student's next update; how many numbers it is, as a part of the student's."""
        energy = self.hparams.energy(uploads[0].report.round, self.settings.run.rounds)
        self.update = compressed(self.averaged(uploads), energy)
        self.weights = applied(self.weights, expanded(self.update, self.weights), self.parameters)
        self.holders = {upload.site: torch.tensor(1) for upload in uploads}
        sizes = [sum(value.numel() for value in weights.values()) for weights in (self.update, self.weights)]
        return {"compression": sizes[0] / sizes[1]}

    def starting_point(self, site: str) -> StateDict:
        return self.weights | {name: torch.zeros_like(self.weights[name]) for name in self.parameters}
