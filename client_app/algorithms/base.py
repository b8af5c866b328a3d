"""The client's side of an algorithm: hooks, in the order in which `client_app/app.py` calls them.

restore -> receive -> (evaluate `evaluation_model`) -> fit (asks `loss` once per batch) -> upload

An algorithm overrides what differs. It is built anew for every round; what shall live on is named
in `state`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from client_app.learning import training
from client_app.learning.data import Samples
from client_app.learning.evaluation import features_of
from client_app.learning.sample_use import SampleUse
from client_app.learning.training import (
    Batch,
    Correction,
    FusedStep,
    GradientSums,
    Loss,
    LossTerms,
    Proximal,
    Step,
)
from client_app.protections.base import Protections
from protofl_common.algorithms.base import Algorithm, Hparams
from protofl_common.config.architectures import ARCHITECTURES
from protofl_common.experiment.catalog import CATALOG, half
from protofl_common.experiment.settings import Settings
from protofl_common.maths.losses import positive_unlabelled_risk
from protofl_common.maths.prototypes import Prototypes, by_class
from protofl_common.models.split import SplitModel
from protofl_common.runs.attributes import pack_attributes, restore_attributes
from protofl_common.tasks import Task
from protofl_common.wire.payloads import Payload, StateDict, declared_part, template_of
from protofl_common.wire.records import Instructions
from protofl_common.wire.schema import Declared, Template, weights_in

__all__ = [  # what an algorithm's file needs
    "Batch",
    "ClientAlgorithm",
    "ClientView",
    "H",
    "LossTerms",
    "Payload",
    "Prototypes",
    "Proximal",
    "Samples",
    "SplitModel",
    "StateDict",
    "Step",
    "by_class",
    "client_half",
]

H = TypeVar("H", bound=Hparams)


class ClientView(Protocol):
    """What an algorithm's client half may use of its client; a `Workshop` has it all."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def instructions(self) -> Instructions:
        """The round, and which of this client's earlier uploads the server has merged."""

    @property
    def device(self) -> torch.device: ...
    @property
    def task(self) -> Task:
        """The task, which defines the loss of labels and the prototypes of a sample."""

    @property
    def num_classes(self) -> int:
        """C, the number of classes that prototypes are of."""

    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def train_set(self) -> Samples: ...
    @property
    def large_classes(self) -> Tensor:
        """Labels [K] of the classes large enough that they may be sent (``min-class-samples``)."""

    @property
    def arch(self) -> str: ...
    @property
    def model(self) -> SplitModel:
        """A model of ``arch``, with this client's first weights."""

    @property
    def reports_failed_training(self) -> bool: ...
    def new_model(self, arch: str, owner: str) -> SplitModel:
        """Return a model whose first weights follow from the seed and ``owner``.

        That is a client's name, or "global" for first weights that all clients share.
        """

    def seed_for(self, purpose: str, *more: str | int) -> int:
        """Return the seed of this client's draws for one purpose."""


class ClientAlgorithm(Generic[H]):
    """Local training alone: every hook of the simplest algorithm, to be overridden."""

    state: tuple[str, ...] = ("model",)
    """Attributes that live on until the client's next round: modules, tensors, prototypes,
    optimizers, generators, and dictionaries of these. A model that the server overwrites need not
    be among them."""

    trains: tuple[str, ...] = ("model",)
    """What `fit` trains with one optimizer; the first gives features and logits."""

    needs_gradients = False
    """True where the loss or the step uses weights or gradients (proximal terms, clipping) or runs
    a layer twice. `FusedStep`, which does not keep gradients, is not taken then."""

    similarity = "l2"  # How prediction compares with prototypes: ``l2`` or ``cosine``
    predicts_with_head = True  # False: the head is not trained, so its accuracy is not reported
    global_prototypes: Prototypes | None = None  # The server's, on the device
    last_round: int | None = None  # The round whose state was restored; None in the first one
    protections = Protections()  # Of this message; `build_half` sets them

    def __init__(self, client: ClientView, round_number: int) -> None:
        self.client = client
        self.round = round_number
        self.settings = client.settings
        self.task = client.task
        self.training = training.in_round(client.settings, round_number)
        self.hparams = cast(H, client.settings.hparams)
        self.model: SplitModel = client.model
        self.evaluation_arch = client.arch  # The name of the network of `evaluation_model`
        self.of_catalog = self.settings.run.algo in CATALOG and client.arch in ARCHITECTURES
        """True where algorithm and network are this project's, so that short cuts are safe."""

    # -- before training -------------------------------------------------------------------------
    def restore(self, tensors: Mapping[str, Tensor], last_round: int) -> None:
        """Restore the attributes of `state` from ``tensors``, as they were after ``last_round``.

        It is called before `receive`, so the model is still the one that this client has trained.
        """
        restore_attributes(self, self.lasting, tensors)
        self.last_round = last_round

    def receive(self, payload: Payload) -> None:
        """Take over the server's payload, which may be empty.

        Weights are copied into the modules that the catalog's row names for them, and prototypes
        become `global_prototypes`.
        """
        if "prototypes" in payload.entries:
            prototypes = payload.vectors()
            if prototypes is not None:
                self.global_prototypes = prototypes.to(self.client.device)

        for name, entry in weights_in(self.settings.exchange.down).items():
            weights = payload.weights(name)
            if weights is None:
                continue
            module: nn.Module = getattr(self, entry.of)
            if self.of_catalog:
                # it takes a third of load_state_dict's time, which other packages' modules need:
                # their state may be more than their tensors
                for key, tensor in declared_part(module, entry).items():
                    tensor.copy_(weights[key])
            else:
                # `unpack_payload` has seen to it that all that is declared is there
                module.load_state_dict(weights, strict=False)

    @cached_property
    def global_table(self) -> tuple[Tensor, Tensor]:
        """The global prototypes by class [C, D], and a mask [C] of the classes that have one."""
        assert self.global_prototypes is not None
        return by_class(self.global_prototypes, self.client.num_classes)

    def evaluation_model(self) -> SplitModel:
        """Return the model that is evaluated, and written to a file after the run."""
        return self.model

    def prototypes_for_prediction(self) -> Prototypes | None:
        """Return the prototypes whose nearest one predicts, on the device; None for head alone."""
        return self.global_prototypes

    # -- training --------------------------------------------------------------------------------
    @cached_property
    def privacy(self) -> SampleUse:
        """How the upload uses samples, with ``dp`` and without; under ``dp`` each use costs ε."""
        return self.protections.sample_use()

    @property
    def modules(self) -> Sequence[nn.Module]:
        return tuple(getattr(self, name) for name in self.trains)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return training.make_optimizer(self.modules, self.training)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the named scalar terms of a batch of labelled samples; their sum is minimised."""
        return {"cross-entropy": self.task.loss(batch.logits, batch.labels)}

    @property
    def labelled_loss(self) -> Loss:
        """The loss that is trained: `loss` of the labelled samples, as settings complete it.

        Where some samples have no label (``positive-rate``), FedPU's risk of these is added
        (`positive_unlabelled_risk`), with the weight ``pu-weight``.
        """
        data = self.client.train_set
        if data.unlabelled is None:
            return self.loss
        settings = self.training
        num_unlabelled = len(data.unlabelled)
        counts_C = self.task.class_counts(data.labels)

        def loss_with_unlabelled(batch: Batch) -> LossTerms:
            is_labelled_B = self.task.known(batch.labels)
            terms: LossTerms = {}  # `loss` has no meaning for a batch without any label
            if bool(is_labelled_B.any()):
                terms = self.loss(batch.only(is_labelled_B))
            if settings.pu_weight > 0:
                non_negative = settings.pu_risk == "non-negative"
                risk = positive_unlabelled_risk(
                    batch.logits, batch.labels, counts_C, num_unlabelled, non_negative
                )
                terms["unlabelled"] = settings.pu_weight * risk
            return terms

        return loss_with_unlabelled

    def step(
        self, correction: Correction | None = None, gradient_sums: GradientSums | None = None
    ) -> Step:
        """Return the step that trains `modules` by `labelled_loss`, as protections change it.

        It is fused where neither the algorithm nor a correction needs gradients, and where losses
        and layers are this project's. Under ``dp`` it is a step of DP-SGD.
        """
        uses_gradients = self.needs_gradients or correction or gradient_sums
        step_class = FusedStep if self.of_catalog and not uses_gradients else Step
        step: Step = step_class(
            self.modules, self.optimizer, self.labelled_loss, correction, gradient_sums
        )
        return self.protections.step(step)

    def fit(self) -> dict[str, float]:
        """Train for a round, and return the mean of each loss term.

        An algorithm whose row in the catalog names no loss terms does not train.
        """
        if not self.settings.row.losses:
            return {}
        return self.train(self.step())

    @property
    def training_set(self) -> Samples:
        """The samples that batches are drawn from: the labelled ones, or all with ``pu-weight``."""
        data = self.client.train_set
        return data.with_unlabelled() if self.training.pu_weight > 0 else data

    def train(
        self,
        step: Step,
        epochs: int | None = None,
        batch_size: int | None = None,
        purpose: str = "train",
        data: Samples | None = None,
    ) -> dict[str, float]:
        """Train on `training_set`, or on ``data`` made of it, and return the mean loss terms.

        ``epochs`` and ``batch_size`` replace those of the settings; under ``dp`` these are refused,
        as is ``data``. The seed of shuffling and dropout follows from ``purpose`` and the round, so
        a second training in a round needs another purpose.
        """
        as_charged = epochs is None and batch_size is None and data is None
        self.privacy.begin_training(step, as_charged)

        settings = self.training
        if epochs is not None:
            settings = training.for_epochs(settings, epochs)
        if batch_size:
            settings = replace(settings, batch_size=batch_size)
        if data is None:
            data = self.training_set
        seed = self.client.seed_for(purpose, self.round)
        return training.train(step, data, settings, seed, self.client.reports_failed_training)

    # -- after training --------------------------------------------------------------------------
    def upload(self) -> Payload:
        """Return the prototypes and the weights that the row declares for this round.

        The prototypes have counts of samples, which protections need even where the row does not
        let them travel.
        """
        declared = self.settings.due_up(self.round)
        prototypes = self.local_prototypes() if "prototypes" in declared else None
        weights = {name: self.weights(name) for name in weights_in(declared)}
        return Payload(prototypes=prototypes, **weights)

    def weights(self, name: str = "weights") -> StateDict:
        """Return the weights that the row declares under ``name`` for the upload."""
        entry = weights_in(self.settings.exchange.up)[name]
        return declared_part(getattr(self, entry.of), entry)

    def local_prototypes(self) -> Prototypes:
        """Return the mean feature of each class in the training data (FedProto Eq. 1)."""
        data = self.client.train_set
        features_MD, classes_M = self.task.assigned(self.features(data), data.labels.cpu())
        return self.privacy.class_means(features_MD, classes_M, self.client.num_classes)

    def features(self, data: Samples) -> Tensor:
        """Return the features [N, D] of ``data`` from which prototypes are made, on the CPU."""
        return features_of(self.model, data, self.training.eval_batch_size)

    # -- what the app asks -----------------------------------------------------------------------
    @property
    def all_modules(self) -> list[nn.Module]:
        """All modules among the attributes, which `Released` covers under ``dp``."""
        return [value for value in vars(self).values() if isinstance(value, nn.Module)]

    @property
    def lasting(self) -> tuple[str, ...]:
        """The names in `state`, and "optimizer" where the settings keep it between rounds.

        A one-shot algorithm trains nothing, and so has no optimizer to keep.
        """
        if self.training.keep_optimizer and not self.settings.row.one_shot:
            return (*self.state, "optimizer")
        return self.state

    def packed_state(self) -> dict[str, Tensor]:
        return pack_attributes(self, self.lasting)

    def templates(self, declared: Declared) -> dict[str, Template]:
        """Return the name, dtype and shape of every array of each declared entry of weights."""
        templates = {}
        for name, entry in weights_in(declared).items():
            module = getattr(self, entry.of)
            templates[name] = template_of(declared_part(module, entry))
        return templates


def client_half(row: Algorithm) -> type[ClientAlgorithm[Any]]:
    return half(row.client, ClientAlgorithm)


def build_half(
    client: ClientView, round_number: int, protections: Protections
) -> ClientAlgorithm[Any]:
    """Build the client half of the run's algorithm for a round, 0 before the first."""
    algorithm = client_half(client.settings.row)(client, round_number)
    algorithm.protections = protections
    return algorithm
