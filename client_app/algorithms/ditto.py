"""Ditto, client half: beside the global model a personal one that is drawn to it.

Source: Li et al., "Fair and Robust Federated Learning Through Personalization", ICML 2021.
Other half: `server_app/strategies/fedavg.py`; the server is FedAvg's.
Symbols: w^t the global model that came down; v_k this client's personal model; F_k the
cross-entropy; λ = ``lambda``.

Global model (Alg. 1)   w_k from w^t, as FedAvg
Personal model          v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w^t)),
                        which minimises F_k(v_k) + (λ/2) · ‖v_k − w^t‖²
Inference               the personal model

Down: w^t. Up: w_k. Stays: v_k.

Deviations: both models see the same batches, for ``local-epochs`` each, as in the authors' code. A
client's first v_k is the first global model that it receives; in the authors' code it is w^0, also
for a client that joins later. Buffers (batch-normalisation statistics) are each model's own.
"""

from copy import deepcopy

from client_app.algorithms.base import ClientView, Payload, Proximal, SplitModel, Step
from client_app.algorithms.fedavg import FedAvg
from protofl_common.algorithms.ditto import DittoHparams


class Ditto(FedAvg[DittoHparams]):
    """FedAvg, and beside it a model of this client's own that is drawn to the global one."""

    state: tuple[str, ...] = ("personal",)
    trains: tuple[str, ...] = ("model", "personal")  # with one optimizer

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        self.personal = deepcopy(self.model)

    def receive(self, payload: Payload) -> None:
        """Take over the global model, and in this client's first round as personal model, too."""
        super().receive(payload)
        if self.last_round is None:
            self.personal.load_state_dict(self.model.state_dict())

    def evaluation_model(self) -> SplitModel:
        return self.personal

    def fit(self) -> dict[str, float]:
        """Train the personal model v_k first, and then the global one as FedAvg does.

        In this order v_k is drawn to the global model as it was received. Return the losses of v_k,
        and the cross-entropy of the global model.
        """
        proximal = Proximal(self.personal, self.model, self.hparams.lambda_)
        step = Step((self.personal,), self.optimizer, self.labelled_loss, proximal)
        losses = self.train(step)
        global_losses = super().fit()
        if "cross-entropy" in global_losses:
            losses["global-cross-entropy"] = global_losses["cross-entropy"]
        return losses
