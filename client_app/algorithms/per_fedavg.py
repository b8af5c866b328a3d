"""Per-FedAvg, client half: train a global model that is one step away from every client's own.

Source: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees", NeurIPS 2020.
Other half: `server_app/strategies/fedavg.py`; the server is FedAvg's.
Symbols: w the model that adapts well, of which w̃ is the version after one step; D, D' two batches;
α, β = ``lr``.

Step (Alg. 1, first-order)  w̃ = w − α · ∇f(w; D);   w ← w − β · ∇f(w̃; D')
Evaluation                  of w after one such inner step on a batch of this client's training data

Down: w. Up: w after local training. Stays: nothing but the data.

Deviations: this is Per-FedAvg (FO), which leaves out the Hessian of the full step; both are the
paper's. D and D' are the halves of a batch of twice ``batch-size``; a rest of fewer than four
samples serves as both. As in PFLlib, a local epoch is two passes over the data, so that w takes as
many steps as FedAvg's; with ``local-steps`` each counts once. Momentum and weight decay, where set,
are the outer step's. Batch-normalisation statistics see D and D'.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from client_app.algorithms.base import LossTerms, SplitModel, Step
from client_app.algorithms.fedavg import FedAvg
from client_app.learning.training import make_optimizer, shuffled_batches
from protofl_common.algorithms.per_fedavg import PerFedAvgHparams
from protofl_common.models.devices import seed_torch


@dataclass(eq=False)
class MetaStep(Step):
    """Takes w̃ = w − α ∇f(w) on one half of a batch, and then moves w by ∇f(w̃) on the other."""

    alpha: float = field(kw_only=True)

    def __call__(self, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """Update the weights w by a batch, and return the loss terms on its second half.

        These are of the adapted weights w̃, which are w after a step on the first half.
        """
        first = second = (inputs, labels, index)
        if len(labels) > 3:  # then a half has two samples; a smaller batch serves as both halves
            halves = [value.tensor_split(2) for value in (inputs, labels, index)]
            first, second = zip(*halves, strict=True)
        before = [weight.detach().clone() for weight in self.model.parameters()]

        self.adapt(*first)  # from w to w̃
        terms = self.terms(self.model, *second)
        if terms:
            self.gradients(terms)

        with torch.no_grad():  # back to w, which then descends by the gradients of w̃
            for weight, start in zip(self.model.parameters(), before, strict=True):
                weight.copy_(start)
        if terms:
            self.optimizer.step()
        return terms

    def adapt(self, inputs: Tensor, labels: Tensor, index: Tensor) -> None:
        """Change the model's weights from w to w̃ by a step of plain gradient descent, of rate α."""
        terms = self.terms(self.model, inputs, labels, index)
        if not terms:
            return
        self.gradients(terms)
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=self.alpha)


class PerFedAvg(FedAvg[PerFedAvgHparams]):
    """FedAvg of models that are one step away from every client's own."""

    def fit(self) -> dict[str, float]:
        """Train on batches of twice the size, as a step takes two batches.

        So an epoch has half as many steps, and there are twice as many epochs.
        """
        training = self.training
        alpha = self.hparams.alpha
        step = MetaStep(self.modules, self.optimizer, self.labelled_loss, alpha=alpha)
        epochs = None if training.local_steps else 2 * training.local_epochs
        return self.train(step, epochs, 2 * training.batch_size)

    def evaluation_model(self) -> SplitModel:
        return self._adapted

    @cached_property
    def _adapted(self) -> SplitModel:
        """The model after one gradient step on a random batch of this client, which predicts."""
        training = self.training
        model = deepcopy(self.model).train()
        seed = self.client.seed_for("adapt", self.round)
        generator = torch.Generator().manual_seed(seed)
        batch = next(shuffled_batches(self.client.train_set, training.batch_size, generator))
        seed_torch(seed)  # dropout
        optimizer = make_optimizer((model,), training)  # clears gradients, and takes no step
        step = MetaStep((model,), optimizer, self.labelled_loss, alpha=self.hparams.alpha)
        step.adapt(*batch)
        return model
