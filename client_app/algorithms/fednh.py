"""FedNH, client half: a fixed head.

Source: Dai et al., "Tackling Data Heterogeneity … with Class Prototypes", AAAI 2023.
Other half: `server_app/strategies/fednh.py`.
Symbols: W [C, D] the class prototypes, of length 1, which are the head; z = f(x) features; s a
trained number.

Logits              s · W z / ‖z‖
Loss                cross-entropy; the body f and s are trained, W is not
Upload              μ_i^c = mean of z / ‖z‖ over this client's training samples of class c,
                    after training
Inference           the class of the largest cosine; the head and the nearest prototype say the same

Down: the weights of the body, s, and W. Up: the weights of the body, s, the class means and how
many samples stand behind each. Stays: nothing but the data.

Deviations: the equations are those of the authors' code. The head that a client leaves after the
run has the weight W and no bias: W z is largest where the cosine is. It has no dropout.
"""

from copy import deepcopy

from torch import Tensor
from torch.nn.functional import normalize

from client_app.algorithms.base import ClientView, Payload, Samples, SplitModel
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.fednh import FedNHHparams
from protofl_common.models.split import CosineHead


class FedNH(FedAvg[FedNHHparams]):
    """FedAvg of the bodies, under a head that the server gives."""

    similarity = "cosine"

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        feature_dim = self.settings.model.feature_dim
        head = CosineHead(client.num_classes, feature_dim, self.hparams.scale)
        self.head = head.to(client.device)
        self.model = SplitModel(client.model.body, self.head)

    def receive(self, payload: Payload) -> None:
        super().receive(payload)
        if self.global_prototypes is not None:
            self.head.weight, _ = self.global_table

    def evaluation_model(self) -> SplitModel:
        """Return the body with the class prototypes as the weight of a linear head without bias."""
        head = deepcopy(self.client.model.head)
        bias_C = self.head.weight.new_zeros(self.client.num_classes)
        head.load_state_dict({"weight": self.head.weight, "bias": bias_C})
        return SplitModel(self.model.body, head)

    def features(self, data: Samples) -> Tensor:
        return normalize(super().features(data))
