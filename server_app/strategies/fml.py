"""FML (Shen et al., "Federated Mutual Learning", 2020), server half: FedAvg of the meme models.

Other half: `client_app/algorithms/fml.py`.
The private models, and their architectures, are the clients' own affair.
"""

from __future__ import annotations

from protofl_common.catalog import FMLHparams
from protofl_common.models.initial import initial_model
from protofl_common.models.split import SplitModel
from server_app.strategies.fedavg import FedAvg


class FML(FedAvg[FMLHparams]):
    """Keeps the meme model."""

    def first_model(self) -> SplitModel:
        """The meme model of the first round."""
        card, settings = next(iter(self.federation.cards.values())), self.settings
        arch = settings.architecture(0, self.hparams.meme)
        return initial_model(arch, card.input_shape, self.num_classes, settings.model, settings.run.seed, "global")
