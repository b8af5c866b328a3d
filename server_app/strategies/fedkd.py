"""FedKD (Wu et al., Nature Communications 2022), server half: the mean of the students' updates.

Other half: `client_app/algorithms/fedkd.py`.
Symbols: A_i the update of client i, cut by SVD; n_i its training samples; w the student.

Update              Ā = Σ_i (n_i / Σ n) · A_i, cut by SVD as the clients cut theirs
Student             w ← w + Ā, which is what the clients make of the updates that they are sent

Deviations: a mean by samples, where the text has a plain one. A client that did not take part in
the last merged round does not have what Ā changes, and is sent the student w instead.
"""

from collections.abc import Sequence

import torch

from protofl_common.algorithms.fedkd import FedKDHparams
from protofl_common.maths.low_rank import apply_change, compress, expand
from server_app.strategies.base import Federation, Payload, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


class FedKD(FedAvg[FedKDHparams]):
    """Keeps the student, its last update, and which clients have the student before that update."""

    state = ("weights", "update", "holders")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.update: StateDict = {}
        self.holders: dict[str, torch.Tensor] = {}

    def payload_down(self) -> Payload:
        return Payload(weights=self.weights)

    def payload_for(self, site: str, common: Payload) -> Payload:
        """Return the update for a client that has the student before it, else the whole student.

        The client is then taken out of those that have the student, until `merge` has a valid reply
        of it.
        """
        if self.holders.pop(site, None) is None:
            return common
        return Payload(update=self.update)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Update the student by the mean of the updates, cut by SVD to the round's energy.

        The figure "compression" is the size of the update as a fraction of the student's.
        """
        energy = self.hparams.energy(uploads[0].report.round, self.settings.run.rounds)
        self.update = compress(self.averaged(uploads), energy)
        self.weights = apply_change(
            self.weights, expand(self.update, self.weights), self.parameters
        )
        self.holders = {upload.site: torch.tensor(1) for upload in uploads}
        numbers_sent = sum(value.numel() for value in self.update.values())
        numbers = sum(value.numel() for value in self.weights.values())
        return {"compression": numbers_sent / numbers}

    def starting_points(self, name: str, sites: Sequence[str]) -> list[StateDict]:
        """Return the updates without training: zeros for parameters, buffers as they are."""
        zeros = {name: torch.zeros_like(self.weights[name]) for name in self.parameters}
        return [{**self.weights, **zeros}] * len(sites)
