"""SCAFFOLD, client half: correct each step by the difference of two control variates.

Source: Karimireddy et al., "Stochastic Controlled Averaging for Federated Learning", ICML 2020.
Other half: `server_app/strategies/scaffold.py`.
Symbols: x the global model; y_i the local one; c, c_i control variates of the server and of this
client; g_i(y) the gradient of a batch; K the local steps; η_l = ``lr``.

Step (Eq. 3)        y_i ← y_i − η_l (g_i(y_i) − c_i + c), from y_i = x
Variate (Eq. 4)     c_i⁺ = (1/K) Σ_k g_i(y_{i,k}),
                    which is c_i − c + (x − y_i) / (K η_l) of option II
Change              Δc_i = c_i⁺ − c_i

Down: x and c. Up: y_i and Δc_i. Stays: c_i and Δc_i, which is added to c_i once the server says
that it counted.

Deviations: c_i⁺ is computed as the mean of the gradients. That equals option II for the paper's
plain SGD, and needs no correction for ``momentum``, ``weight-decay`` or Adam. The step uses the
settings' optimizer, momentum included; the paper has none.
"""

from client_app.algorithms.base import ClientView, H, Payload
from client_app.algorithms.fedavg import FedAvg
from client_app.learning.training import GradientSums
from protofl_common.algorithms.scaffold import SCAFFOLDHparams
from protofl_common.models.split import control_variate, variate_changes


class KeepsVariate(FedAvg[H]):
    """FedAvg whose clients keep a variate c_i, ``own``, and its last ``change`` Δc_i.

    The variate changes once the server says that the change counted: the mean of all clients'
    variates is then what the server makes of their changes, whatever becomes of single replies.
    """

    state: tuple[str, ...] = ("own", "change")

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        self.own = control_variate(self.model)
        self.change = control_variate(self.model)

    def receive(self, payload: Payload) -> None:
        """Take over the global model, and add the last Δc_i to c_i as far as the server used it.

        The message names the last round of this client that was merged, and the fraction (``part``)
        of its change that was used.
        """
        super().receive(payload)
        if self.last_round == self.client.instructions.counted:
            for own, change in zip(self.own, self.change, strict=True):
                own.add_(change, alpha=self.client.instructions.part)


class SCAFFOLD(KeepsVariate[SCAFFOLDHparams]):
    """FedAvg whose steps are corrected by c_i and the server's ``control`` c."""

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        self.control = control_variate(self.model)

    def fit(self) -> dict[str, float]:
        """Train by Eq. 3, and set `change` to Δc_i of Eq. 4; return the mean of each loss term.

        Each step's gradient is corrected by the server's variate less this client's, c − c_i. The
        new c_i is the mean of the uncorrected gradients.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        sums = GradientSums(trained)

        def corrected() -> None:
            for parameter, own, control in zip(trained, self.own, self.control, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(control - own)

        losses = self.train(self.step(corrected, sums))
        changes = self.privacy.post_processed(variate_changes, sums.totals, sums.steps, self.own)
        for change, new in zip(self.change, changes, strict=True):
            change.copy_(new)
        return losses
