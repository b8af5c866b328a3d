"""FedDBE, client half: a vector of the client's own between the shared body and the shared head.

Source: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space",
NeurIPS 2023; there FedAvg+DBE.
Other half: `server_app/strategies/feddbe.py`.
Symbols: z = f(x) [B, D] features; p [D] this client's bias memory; m_i [D] its mean feature, m that
of all clients; κ = ``kappa``, μ = ``momentum``.

Logits              g(z + p); p is trained with the model, and 0 at first
Mean feature        m_i ← (1 − μ) m_i + μ · mean of z over the batch, from 0 in every round
Loss                cross-entropy + κ · ½ ‖m_i − m‖² / D
First round         g(z) and cross-entropy alone, until there is an m

Down: the weights of the global model, and m once there is one. Up: the weights, and m_i. Stays: p.

Deviations: equations are those of the authors' code, whose κ is 50, with more features and smaller
steps. It throws the weights of the first round away; here they are averaged, as any
round's. The model that a client leaves has p within the bias of its head: g(z + p) is W z + (W p +
b).
"""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from client_app.algorithms.base import Batch, ClientView, LossTerms, SplitModel
from client_app.algorithms.fedavg import FedAvg
from client_app.learning.training import Loss
from protofl_common.algorithms.feddbe import FedDBEHparams
from protofl_common.models.split import FeatureMean, first_layer


class FedDBE(FedAvg[FedDBEHparams]):
    """FedAvg whose head sees features that are moved by a vector of the client's own."""

    state: tuple[str, ...] = ("memory",)
    trains: tuple[str, ...] = ("model", "memory")
    needs_gradients = True  # the head is used twice

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        width = self.settings.model.feature_dim
        # p [D], in a module of its own: `trains` names modules
        self.memory = nn.ParameterList([torch.zeros(width)]).to(client.device)
        self.running = FeatureMean(width).to(client.device)
        self.consensus = FeatureMean(width).to(client.device)

    @property
    def has_consensus(self) -> bool:
        return bool(self.consensus.num_batches_tracked)

    @property
    def labelled_loss(self) -> Loss:
        """The loss, on logits of the features plus the client's memory once there is a consensus.

        Before, logits are those of the features alone.
        """
        loss = super().labelled_loss
        if not self.has_consensus:
            return loss

        def loss_with_memory(batch: Batch) -> LossTerms:
            logits_BC = self.model.head(batch.features + self.memory[0])
            return loss(replace(batch, logits=logits_BC))

        return loss_with_memory

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and κ times the distance of the mean feature from all clients'.

        The mean is the running one of this round, which this call updates by the batch. Until the
        server sends the mean of all clients, there is no distance.
        """
        terms = super().loss(batch)
        mean_D = self.running.updated(batch.features, self.hparams.momentum)
        if self.has_consensus and self.hparams.kappa > 0:
            distance = (mean_D - self.consensus.mean).square().mean() / 2  # ½ ‖m_i − m‖² / D
            terms["mean-regularization"] = self.hparams.kappa * distance
        return terms

    def evaluation_model(self) -> SplitModel:
        """Return a model whose head adds the memory p to the features z by its bias.

        For W (z + p) + b = W z + (W p + b), where W and b are those of the head's first layer.
        """
        head = deepcopy(self.model.head)
        layer = first_layer(head)
        with torch.no_grad():
            layer.bias.add_(layer.weight @ self.memory[0])
        return SplitModel(self.model.body, head)
