"""FedRep, client half: a head of its own, fitted anew to the common body in each round.

Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021.
Other half: `server_app/strategies/fedavg.py`; the server is FedAvg's, of the body.
Symbols: φ the body, h_i client i's head, f_i its cross-entropy; τ = ``head-epochs``, for the head.

Head (Alg. 1)       h_i ← τ epochs of steps on f_i(h, φ) from the head of its last round;
                    φ as received
Body                φ_i ← ``local-epochs`` epochs of steps on f_i(h_i, φ); h_i as it is now
Evaluation          of φ as received under the client's head of its last round, before either trains

Down: φ. Up: φ_i. Stays: h_i.

Deviations: while the head trains the body is fixed altogether: features are computed once, in
evaluation mode, and batch-normalisation statistics do not move. The paper counts single steps for
the body, its experiments epochs (1 or 5). The server averages by training samples, as in the
authors' code; Alg. 1 averages plainly. The loss reported is that of the body's epochs. After the
last round, the authors' code fits all heads once more, FedAvg's too; nothing does so here.
"""

from dataclasses import replace
from functools import cached_property

import torch

from client_app.algorithms.base import ClientAlgorithm, SplitModel, Step
from client_app.learning.training import make_optimizer
from protofl_common.algorithms.fedrep import FedRepHparams


class FedRep(ClientAlgorithm[FedRepHparams]):
    """First the head, then the body."""

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer((self.model.body,), self.training)

    @cached_property
    def head_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the head's own optimizer, None where the head has nothing to train."""
        head = self.model.head
        if not any(parameter.requires_grad for parameter in head.parameters()):
            return None
        return make_optimizer((head,), self.training)

    @property
    def lasting(self) -> tuple[str, ...]:
        if self.training.keep_optimizer:
            return (*super().lasting, "head_optimizer")
        return super().lasting

    def fit(self) -> dict[str, float]:
        self._fit_head()
        return super().fit()

    def _fit_head(self) -> None:
        """Train the head for ``head-epochs`` on features of the body as it was received."""
        optimizer = self.head_optimizer
        if optimizer is None:
            return
        features_ND = self.features(self.training_set).to(self.client.device)
        data = replace(self.training_set, inputs=features_ND, augment=None)  # no images any more
        head_alone = SplitModel(torch.nn.Identity(), self.model.head)
        step = Step((head_alone,), optimizer, self.labelled_loss)
        self.train(step, self.hparams.head_epochs, purpose="head", data=data)
