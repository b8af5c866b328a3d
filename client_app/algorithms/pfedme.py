"""pFedMe, client half: a personal model within a Moreau envelope around the global one.

Source: Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.
Other half: `server_app/strategies/pfedme.py`.
Symbols: w_i this client's copy of the global model w; θ its personalised model; f the cross-entropy
of a batch; λ = ``lambda``; K = ``personal-steps``; η_p = ``lr``, for any optimizer; η = ``eta``.

Personalised model (Eq. 7)  θ ≈ argmin_θ f(θ) + (λ/2) · ‖θ − w_i‖²,
                            by K steps θ ← θ − η_p (∇f(θ) + λ (θ − w_i))
Local model (Alg. 1)        w_i ← w_i − η λ (w_i − θ), once per batch:
                            the gradient of the Moreau envelope
Inference                   θ as it was after the client's last round

Down: w. Up: w_i after local training. Stays: θ.

Deviations: as in the authors' code, θ goes on from batch to batch, and starts each round from w.
The local rounds R are the batches of ``local-epochs``. Momentum and weight decay, where set, are of
the K steps (the authors' μ = 0.001 is weight decay). Batch-normalisation statistics are θ's, and go
up as w_i's.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from client_app.algorithms.base import LossTerms, Proximal, Step
from client_app.algorithms.ditto import Ditto
from protofl_common.algorithms.pfedme import PFedMeHparams


@dataclass(eq=False)
class EnvelopeStep(Step):
    """K steps of θ towards the minimum of Eq. 7, then one step of w_i towards θ, by the part η λ.

    θ is the first module, w_i the second.
    """

    hparams: PFedMeHparams = field(kw_only=True)

    def __post_init__(self) -> None:
        model, centre = self.modules
        self.proximal = Proximal(model, centre, self.hparams.lambda_)
        self.correction = self.proximal

    def __call__(self, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """Update both models by a batch, and return the loss terms of θ before its last step.

        θ takes ``personal-steps`` steps on the loss and towards w_i; then w_i moves towards θ.
        """
        terms: LossTerms = {}
        for _ in range(self.hparams.personal_steps):
            terms = super().__call__(inputs, labels, index)
        with torch.no_grad():
            for parameter, centre in self.proximal.pairs:
                centre.lerp_(parameter, self.hparams.eta * self.hparams.lambda_)
        return terms


class PFedMe(Ditto):
    """Ditto's two models, of which the global one learns from the personal one."""

    hparams: PFedMeHparams
    trains: tuple[str, ...] = ("personal",)  # w_i has no optimizer

    def fit(self) -> dict[str, float]:
        """Train the personal model θ, and let the local model w_i follow it.

        Both begin as the global model. Only θ sees data, so its buffers are copied to w_i at the
        end. Return the mean loss terms of θ.
        """
        self.personal.load_state_dict(self.model.state_dict())
        modules = (self.personal, self.model)
        step = EnvelopeStep(modules, self.optimizer, self.labelled_loss, hparams=self.hparams)
        losses = self.train(step)
        self.model.load_state_dict(dict(self.personal.named_buffers()), strict=False)
        return losses
