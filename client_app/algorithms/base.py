"""The client's side of an algorithm: hooks, in the order in which `client_app/app.py` calls them.

receive -> (evaluate with `prototypes_for_prediction`) -> loss, once per batch of the `training_set` -> upload
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from client_app.data import Samples
from client_app.evaluation import local_features, local_prototypes
from client_app.site import Site
from client_app.training import LossTerms
from protofl_common.datasets import UNLABELLED
from protofl_common.losses import positive_unlabelled_risk
from protofl_common.messages import Payload
from protofl_common.prototypes import Prototypes


class ClientAlgorithm:
    """Local training alone: every hook of the simplest algorithm, to be overridden."""

    global_prototypes: Prototypes | None = None
    """What the server sent, on the device; None where it sent none."""
    similarity = "l2"
    """How prediction compares with prototypes: ``l2`` or ``cosine``."""

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

    @property
    def predicts_with_head(self) -> bool:
        """Whether the head is trained, so that its accuracy is worth reporting."""
        return True

    @property
    def training_set(self) -> Samples:
        """What batches are drawn from: the labelled samples, with ``pu-weight`` the unlabelled ones too."""
        data = self.site.train_set
        return data.with_unlabelled() if self.site.settings.training.pu_weight > 0 else data

    def loss(self, features_BD: Tensor, logits_BC: Tensor, labels_B: Tensor) -> LossTerms:
        """Named scalar terms of a batch, whose sum is minimised: features z = f(x), logits g(z)."""
        return {"cross-entropy": functional.cross_entropy(logits_BC, labels_B)}

    def batch_loss(self, features_BD: Tensor, logits_BC: Tensor, labels_B: Tensor) -> LossTerms:
        """What the training loop asks for: `loss` of the batch's labelled samples (the others' label is -1).

        With ``pu-weight`` FedPU's risk of the unlabelled ones is added; no terms mean that there is nothing to learn.
        """
        hidden, settings = self.site.train_set.unlabelled, self.site.settings.training
        if hidden is None:
            return self.loss(features_BD, logits_BC, labels_B)
        known_B = labels_B != UNLABELLED
        terms = self.loss(features_BD[known_B], logits_BC[known_B], labels_B[known_B]) if bool(known_B.any()) else {}
        if settings.pu_weight > 0:
            counts_C = self.site.train_set.labels.bincount(minlength=self.site.num_classes)
            bounded = settings.pu_risk == "non-negative"
            risk = positive_unlabelled_risk(logits_BC, labels_B, counts_C, len(hidden), bounded)
            terms["unlabelled"] = settings.pu_weight * risk
        return terms

    def local_prototypes(self) -> Prototypes:
        """The class means of this client's training data under its model as it is now: one pass."""
        settings = self.site.settings
        batch_size, dim = settings.training.eval_batch_size, settings.model.feature_dim
        return local_prototypes(self.model, self.site.train_set, batch_size, self.site.num_classes, dim)

    def features(self, data: Samples) -> Tensor:
        """The features [N, D] of ``data`` of which prototypes are means, on the CPU."""
        return local_features(self.model, data, self.site.settings.training.eval_batch_size)

    def upload(self) -> Payload:
        """What goes to the server after training; the catalog's row says what may."""
        return Payload()
