"""FedDBE (Zhang et al., NeurIPS 2023), server half: FedAvg, and the mean feature of all clients.

Other half: `client_app/algorithms/feddbe.py`.
Symbols: m_i [D] client i's mean feature, of n_i training samples.

Models              as FedAvg
Mean feature        m = Σ_i (n_i / Σ n) · m_i over the clients of the first round; it stays as it is

``merging`` may put a median or trimmed mean in the place of both means, and ``max-update-ratio``
bound the length of each m_i.
"""

from collections.abc import Sequence

from protofl_common.algorithms.feddbe import FedDBEHparams
from protofl_common.models.split import FeatureMean
from server_app.strategies.base import Federation, StateDict, Upload
from server_app.strategies.fedavg import FedAvg


class FedDBE(FedAvg[FedDBEHparams]):
    """Keeps the global model, and m, of no batches until the first merge."""

    state = ("weights", "mean")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.mean: StateDict = FeatureMean(self.settings.model.feature_dim).state_dict()

    @property
    def has_consensus(self) -> bool:
        return bool(self.mean["num_batches_tracked"])

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        if not self.has_consensus:
            self.mean = self.averaged(uploads, "mean")
        return super().merge(uploads)

    def starting_points(self, name: str, sites: Sequence[str]) -> list[StateDict] | None:
        """Return what each site would send without training.

        For mean features that is m as it was at first; None once it is set, as it stays so.
        """
        if name != "mean":
            return super().starting_points(name, sites)
        return None if self.has_consensus else [self.mean] * len(sites)
