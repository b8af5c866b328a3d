"""SCAFFOLD (Karimireddy et al., ICML 2020), server half: means of models and of variates' changes.

Other half: `client_app/algorithms/scaffold.py`.
Symbols: x the global model, y_i client i's; c the server's control variate, c_i client i's; S the
round's clients of N; η_g = ``server-lr``.

Model (Eq. 5)       x ← x + (η_g / |S|) Σ_{i ∈ S} (y_i − x)
Variate (Eq. 5)     c ← c + (1/N) Σ_{i ∈ S} Δc_i, so that c is the mean of the N clients' c_i

Every client weighs alike, as in the paper; ``merging`` may put a median or trimmed mean in place of
both means, and ``max-update-ratio`` bound each y_i − x and Δc_i. The next message says which Δc_i
counted, and to what part. If N has changed, c is scaled to it first: a new client's c_i is 0. With
a median or trimmed mean c is not the mean of the c_i. Buffers (batch-normalisation statistics) are
averaged and have no variate.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from protofl_common.algorithms.scaffold import SCAFFOLDHparams
from protofl_common.models.split import control_variate
from server_app.strategies.base import Federation, H, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


def weighed_alike(uploads: list[Upload]) -> list[Upload]:
    """Return the uploads, each of which weighs as one sample."""
    return [replace(upload, max_weight=1) for upload in uploads]


class KeepsMeanVariate(FedAvg[H]):
    """FedAvg that keeps ``control``, the mean of N clients' variates, and N of the last merge."""

    state = ("weights", "control", "clients")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.control: StateDict = {}
        self.clients = torch.tensor(0)

    def add_to_control(self, change: StateDict, sites: int) -> None:
        """Set c to (N_before / N) c + (|S| / N) · ``change``.

        ``change`` is the mean of the Δc_i of the |S| = ``sites`` clients that were merged. N counts
        all clients of the run, also those that are gone but were merged once.
        """
        federation = self.federation
        known = federation.cards.keys() | federation.counted
        num_clients = len(known - federation.new_clients)
        scale = int(self.clients) / num_clients  # N_before / N
        part = sites / num_clients  # |S| / N
        self.control = {
            name: scale * value + part * change[name] for name, value in self.control.items()
        }
        self.clients = torch.tensor(num_clients)


class SCAFFOLD(KeepsMeanVariate[SCAFFOLDHparams]):
    """Keeps the global model and c."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.control = dict(control_variate(self.first_model()).state_dict())

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Update x and c by Eq. 5, with the same weight for every client."""
        equals = weighed_alike(uploads)
        weights = self._moved(equals)
        self.add_to_control(self.averaged(equals, "control"), len(uploads))
        self.weights = weights
        return {}

    def _moved(self, uploads: list[Upload]) -> StateDict:
        """Return x + η_g · (mean of the y_i − x)."""
        mean = self.averaged(uploads)
        for name, before in self.weights.items():
            if before.is_floating_point():
                # η_g may be above 1, with which the variance in a buffer could become negative
                rate = self.hparams.server_lr if name in self.parameters else 1.0
                mean[name] = before + rate * (mean[name] - before)
        return mean

    def starting_points(self, name: str, sites: Sequence[str]) -> list[StateDict] | None:
        """Return what sites would send without training: for changes of variates zeros."""
        if name != "control":
            return super().starting_points(name, sites)
        zeros = {key: torch.zeros_like(value) for key, value in self.control.items()}
        return [zeros] * len(sites)

    def used_fraction(self, upload: Upload) -> float:
        """Return the fraction of Δc_i that is left, where it was cut."""
        return upload.kept_fractions.get("control", 1.0)
