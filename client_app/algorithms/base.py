"""The client's side of an algorithm: hooks, in the order in which `client_app/app.py` calls them.

restore -> receive -> (evaluate `evaluation_model`) -> fit, which asks `loss` once per batch -> upload

An algorithm overrides what differs. It is built anew for every round; what shall live on stands in `state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from client_app.data import Samples
from client_app.evaluation import local_features
from client_app.few_labels import labelled_loss, training_set
from client_app.private_training import PrivateStep
from client_app.site import Site
from client_app.training import Batch, Correction, FusedStep, Loss, LossTerms, Step, in_round, make_optimizer, train
from protofl_common.basics.seeding import derive_seed
from protofl_common.config.architectures import ARCHITECTURES
from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import CATALOG, Hparams
from protofl_common.maths.prototypes import Prototypes, class_means
from protofl_common.models.split import SplitModel
from protofl_common.privacy.plan import Plan
from protofl_common.privacy.release import fresh_draw, private_class_means, private_counts
from protofl_common.runs.attributes import pack_attributes, restore_attributes
from protofl_common.wire.limits import Template
from protofl_common.wire.payloads import Payload, StateDict, part_of, template_of
from protofl_common.wire.schema import Declared, weights_in

H = TypeVar("H", bound=Hparams)


class ClientAlgorithm(Generic[H]):
    """Local training alone: every hook of the simplest algorithm, to be overridden."""

    state: tuple[str, ...] = ("model",)
    """Attributes that live on until the client's next round: modules, tensors, prototypes, optimizers, generators, and
    dictionaries of these. A model that the server overwrites need not be among them."""
    needs_gradients = False
    """True where the loss or the step looks at weights or gradients (proximal terms, clipping) or uses a layer twice:
    every gradient is then left in place until the optimizer's step."""
    steps_differ = False
    """True where the loss draws lots or looks at single numbers: a GPU cannot replay one step as the next."""
    similarity = "l2"
    """How prediction compares with prototypes: ``l2`` or ``cosine``."""
    global_prototypes: Prototypes | None = None
    """What the server sent, on the device; None where it sent none."""
    last_round: int | None = None
    """The client's last round before this one; None if it has no state: it has not taken part before."""
    has_trained = False
    """True after `train`, which the privacy ledger covers once a round."""
    tables_made = 0
    """Number of private tables of classes that this round has made."""

    def __init__(self, site: Site, round_number: int) -> None:
        self.site = site
        self.round = round_number
        self.settings = in_round(site.settings, round_number)
        self.hparams = cast(H, site.settings.hparams)
        self.model: SplitModel = site.model

    # -- before training -----------------------------------------------------------------------------------------

    def restore(self, tensors: Mapping[str, Tensor], last_round: int) -> None:
        """Be as after ``last_round``. It comes before `receive`: here the model is what this client has trained."""
        restore_attributes(self, self.lasting, tensors)
        self.last_round = last_round

    def receive(self, payload: Payload) -> None:
        """Take in what the server sent, of which the base keeps prototypes; in some first rounds that is nothing."""
        prototypes = payload.vectors() if "prototypes" in payload.entries else None
        if prototypes is not None:
            self.global_prototypes = prototypes.to(self.site.device)

    def evaluation_model(self) -> SplitModel:
        """The model that is evaluated, and left for use after the run."""
        return self.model

    def prototypes_for_prediction(self) -> Prototypes | None:
        """Prototypes to predict with by nearest prototype, on the device; None: the head alone predicts."""
        return self.global_prototypes

    @property
    def predicts_with_head(self) -> bool:
        """Return whether the head is trained, so that its accuracy is worth reporting."""
        return True

    # -- training ------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that `fit` trains with one optimizer; the first makes the features and logits of the batch."""
        return (self.model,)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """A new one each round; with ``keep-optimizer`` it goes on as it was."""
        return make_optimizer(self.modules, self.settings.training)

    def loss(self, batch: Batch) -> LossTerms:
        """Named scalar terms of a batch of labelled samples, whose sum is minimised."""
        return {"cross-entropy": functional.cross_entropy(batch.logits, batch.labels)}

    @property
    def labelled_loss(self) -> Loss:
        """`loss` as a step needs it: where labels are few, with FedPU's term for the rest."""
        return labelled_loss(self.loss, self.site.train_set, self.settings.training, self.site.num_classes)

    def step(self, correction: Correction | None = None) -> Step:
        """The update by one batch: DP-SGD's where what is sent must be private, or is noised as in a paper.

        The fused one is used where it is known to be right: with parts of the catalog, and without a correction.
        """
        if (plan := self.site.step_plan) is not None:
            return PrivateStep(self.modules, self.optimizer, self.labelled_loss, plan, correction)
        kind = FusedStep if self.of_catalog and not self.needs_gradients and correction is None else Step
        return kind(self.modules, self.optimizer, self.labelled_loss, correction)

    @property
    def of_catalog(self) -> bool:
        """Return whether algorithm and network are this project's, whose losses and layers are known."""
        return self.settings.run.algo in CATALOG and self.site.arch in ARCHITECTURES

    @property
    def replayable(self) -> bool:
        """Return whether a GPU may replay the steps (`protofl_common/basics/cuda_graph.py`).

        Not with few labels, for a batch's labelled samples are chosen by a mask, nor with DP-SGD.
        """
        alike = self.of_catalog and not self.steps_differ
        return alike and self.site.train_set.unlabelled is None and self.site.step_plan is None

    def fit(self) -> dict[str, float]:
        """Train for a round; the mean of each loss term, which the catalog's row names."""
        return self.train(self.step())

    def fit_covered(self) -> dict[str, float]:
        """`fit`, as the app calls it: SettingsError under differential privacy where that bypasses `train`."""
        losses = self.fit()
        self._check_covered(self.has_trained)
        return losses

    def train(
        self, step: Step, epochs: int | None = None, batch_size: int | None = None, purpose: str = "train"
    ) -> dict[str, float]:
        """The training loop over this client's data; a second one in a round needs another ``purpose`` (its seed).

        SettingsError where differential privacy is asked for, and this is not what its ledger was charged for.
        """
        as_charged = isinstance(step, PrivateStep) and epochs is batch_size is None and not self.has_trained
        self.has_trained = True
        self._check_covered(as_charged)
        seed = derive_seed(self.settings.run.seed, purpose, self.site.name, self.round)
        data = training_set(self.site.train_set, self.settings.training)
        step.replayable = self.replayable
        return train(step, data, self.settings.training, seed, epochs, batch_size)

    # -- after training ------------------------------------------------------------------------------------------

    def upload(self) -> Payload:
        """Return what goes to the server after training. By default, as far as the row declares them, this client's
        prototypes, from one pass over the training data, and weights.

        Prototypes come with their counts, which `disclosure.py` needs, and takes away where the row declares none.
        """
        declared = self.settings.exchange.up
        return Payload(
            prototypes=self.local_prototypes() if "prototypes" in declared else None,
            weights=self.weights() if "weights" in declared else None,
        )

    def weights(self, name: str = "weights") -> StateDict:
        """Return the weights that the row declares under ``name`` for the upload."""
        entry = weights_in(self.settings.exchange.up)[name]
        return part_of(getattr(self, entry.of), entry)

    def exact_prototypes(self) -> Prototypes:
        """The class means of this client's training data under its model as it is now: one pass (FedProto Eq. 1)."""
        self._check_covered(False)
        data = self.site.train_set
        return class_means(self.features(data), data.labels.cpu(), self.site.num_classes)

    def local_prototypes(self) -> Prototypes:
        """The same as they may be sent: with noise where they must be private. Each call costs ε then."""
        if (plan := self.site.plan) is None:
            return self.exact_prototypes()
        data, clip = self.site.train_set, self.settings.privacy.dp_feature_clip
        noise = self._table_noise(plan)
        return private_class_means(
            self.features(data), data.labels.cpu(), self.site.num_classes, clip, noise, fresh_draw()
        )

    def class_counts(self) -> Tensor:
        """[C] int64: training samples of each class, as they may be sent."""
        counts_C = self.site.train_set.labels.cpu().bincount(minlength=self.site.num_classes)
        plan = self.site.plan
        return private_counts(counts_C, self._table_noise(plan), fresh_draw()) if plan else counts_C

    def _table_noise(self, plan: Plan) -> float:
        """σ of a further table; SettingsError where the ledger was charged for fewer."""
        self.tables_made += 1
        self._check_covered(self.tables_made <= plan.tables[self.round - 1])
        return plan.table_noise

    def _check_covered(self, covered: bool) -> None:
        """SettingsError under differential privacy, unless it covers what this client is about to do."""
        if self.site.plan is not None and not covered:
            does = f"{self.settings.run.algo} makes use of training data that the privacy ledger does not cover"
            raise SettingsError(f"dp = 'sample': {does}")

    def features(self, data: Samples) -> Tensor:
        """The features [N, D] of ``data`` of which prototypes are means, on the CPU."""
        return local_features(self.model, data, self.settings.training.eval_batch_size)

    # -- what the app asks ---------------------------------------------------------------------------------------

    @property
    def lasting(self) -> tuple[str, ...]:
        """All attributes that live on."""
        return (*self.state, "optimizer") if self.settings.training.keep_optimizer else self.state

    def packed_state(self) -> dict[str, Tensor]:
        """The attributes that live on, as tensors of a file."""
        return pack_attributes(self, self.lasting)

    def templates(self, declared: Declared) -> dict[str, Template]:
        """Name, dtype and shape of every array of the declared weights."""
        entries = weights_in(declared).items()
        return {name: template_of(part_of(getattr(self, entry.of), entry)) for name, entry in entries}
