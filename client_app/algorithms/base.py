"""The client's side of an algorithm: hooks, in the order in which `client_app/app.py` calls them.

receive -> (evaluate with `prototypes_for_prediction`) -> loss, once per batch -> upload
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from client_app.evaluation import local_prototypes
from client_app.site import Site
from client_app.training import LossTerms
from protofl_common.messages import Payload
from protofl_common.prototypes import Prototypes


class ClientAlgorithm:
    """Local training alone: every hook of the simplest algorithm, to be overridden."""

    global_prototypes: Prototypes | None = None
    """What the server sent, on the device; None where it sent none."""

    def __init__(self, site: Site, round_number: int) -> None:
        self.site = site
        self.round = round_number
        self.settings = site.settings.algorithm
        self.model = site.model

    def receive(self, payload: Payload) -> None:
        """Take in what the server sent, of which the base keeps prototypes; in some first rounds that is nothing."""
        if payload.prototypes is not None:
            self.global_prototypes = payload.prototypes.to(self.site.device)

    def prototypes_for_prediction(self) -> Prototypes | None:
        """Prototypes to predict with by nearest prototype, on the device; None: the head alone predicts."""
        return self.global_prototypes

    def loss(self, features_BD: Tensor, logits_BC: Tensor, labels_B: Tensor) -> LossTerms:
        """Named scalar terms of a batch, whose sum is minimised: features z = f(x), logits g(z)."""
        return {"cross-entropy": functional.cross_entropy(logits_BC, labels_B)}

    def local_prototypes(self) -> Prototypes:
        """The class means of this client's training data under its model as it is now: one pass."""
        settings = self.site.settings
        batch_size, dim = settings.training.eval_batch_size, settings.model.feature_dim
        return local_prototypes(self.model, self.site.train_set, batch_size, self.site.num_classes, dim)

    def upload(self) -> Payload:
        """What goes to the server after training; the catalog's row says what may."""
        return Payload()
