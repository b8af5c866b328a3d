"""FML (Shen et al., "Federated Mutual Learning", 2020), server half: FedAvg of the meme models.

Other half: `client_app/algorithms/fml.py`.
The private models, and their architectures, are the clients' own affair.
"""

from protofl_common.experiment.catalog import FMLHparams
from server_app.strategies.fedavg import FedAvg


class FML(FedAvg[FMLHparams]):
    """Keeps the meme model."""

    @property
    def arch(self) -> str:
        return self.settings.architecture(0, self.hparams.meme)
