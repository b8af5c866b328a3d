"""ProtoFed (Qiao et al., "Prototype Helps Federated Learning", 2023), server half: FedAvg plus the mean of prototypes.

Other half: `client_app/algorithms/protofed.py`.
Symbols: ỹ_{i,j} client i's prototype of class j; φ the clients that hold the class.

Weights             as FedAvg
Prototypes (Eq. 3)  ȳ_j = (1 / |φ|) Σ_{i∈φ} ỹ_{i,j}, in the last round or in every round (`protofed.prototypes`)
``merging`` may put a median or trimmed mean in the place of Eq. 3, and of FedAvg's mean.
"""

from protofl_common.experiment.catalog import ProtoFedHparams
from server_app.replies import Upload
from server_app.strategies.fedavg import FedAvg


class ProtoFed(FedAvg[ProtoFedHparams]):
    """Keeps the global model and, once clients have sent some, the global prototypes."""

    state: tuple[str, ...] = ("weights", "prototypes")

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        self.prototypes = self.merged(uploads, "uniform", self.prototypes)
        return super().merge(uploads)
