"""The training loop: every algorithm trains through it and gives it a loss or a step of its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from client_app.learning.data import Samples
from protofl_common.config.sections import TrainingSettings
from protofl_common.experiment.settings import Settings
from protofl_common.models.devices import seed_torch
from protofl_common.models.fused_linear import fused_linears
from protofl_common.models.split import SplitModel

Batches = Iterator[tuple[Tensor, Tensor, Tensor]]  # Inputs, labels and indices of each
LossTerms = dict[str, Tensor]


class TrainingError(RuntimeError):
    """Training broke down; the message says where and what to try."""


@dataclass(frozen=True)
class Batch:
    """The input of a loss: B samples, with their features and logits."""

    inputs: Tensor  # [B, …]
    labels: Tensor  # [B] int64
    index: Tensor  # [B] int64: which samples of the training set, the same in every epoch and round
    features: Tensor  # z = f(x), [B, D]
    logits: Tensor  # g(z), [B, C]

    def only(self, mask_B: Tensor) -> "Batch":
        """Return the batch of those samples whose mask is True."""
        return Batch(*(value[mask_B] for value in vars(self).values()))


Loss = Callable[[Batch], LossTerms]
"""Named scalar terms, whose sum is minimised; none where there is nothing to learn."""
Correction = Callable[[], None]
"""Changes the gradients in place, before the optimizer takes its step along them."""


class GradientSums:
    """Sums of the gradients of ``parameters`` over all steps of a training (SCAFFOLD).

    Corrections of the gradients are not in them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.totals = [torch.zeros_like(parameter) for parameter in parameters]
        self.steps = torch.zeros((), device=parameters[0].device)

    @torch.no_grad()
    def add(self) -> None:
        self.steps.add_(1)
        for parameter, total in zip(self.parameters, self.totals, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad)


@dataclass(eq=False)
class Step:
    """One update of the weights by one batch.

    It computes gradients, applies the ``correction`` to them, and takes a step of the
    ``optimizer``. Subclasses differ in the gradients (`PrivateStep`) or in the optimizer's part
    (`FusedStep`), and an algorithm brings its correction, so a corrected step can be private. The
    ``optimizer`` trains ``modules``; the first is the model, whose features and logits the ``loss``
    gets.
    """

    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    loss: Loss
    correction: Correction | None = None
    gradient_sums: GradientSums | None = None
    private = False
    """True for DP-SGD: errors must then not tell of the loss, which depends on single samples."""

    @property
    def model(self) -> nn.Module:
        return self.modules[0]

    def __call__(self, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """Update the weights.

        Returns the terms of the loss before the update and, if there are any, their ``total``.
        """
        terms = self.terms(self.model, inputs, labels, index)
        if terms:
            self.gradients(terms)  # of the ``total``, which is one of the terms
            self.descend()
        return terms

    def descend(self) -> None:
        """Correct the gradients, and take the optimizer's step."""
        if self.gradient_sums is not None:
            self.gradient_sums.add()
        if self.correction is not None:
            with torch.no_grad():
                self.correction()
        self.optimizer.step()

    def gradients(self, terms: LossTerms) -> None:
        """Replace the gradients of all parameters by those of the ``total``."""
        # as the optimizer's zero_grad, without an entry in PyTorch's profiler
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        terms["total"].backward()

    def terms(self, model: nn.Module, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """Return the terms of the loss of a batch under ``model``, and their ``total``.

        {} where the loss has no terms, as there is nothing to learn from yet; the forward pass has
        updated batch normalisation all the same. TypeError or ValueError for a loss of another
        form.
        """
        assert isinstance(model, SplitModel)
        features_BD = model.body(inputs)
        logits_BC = model.head(features_BD)
        terms = self.loss(Batch(inputs, labels, index, features_BD, logits_BC))
        if not isinstance(terms, dict):
            kind = type(terms).__name__
            raise TypeError(f"the loss must return a dictionary of named terms, not {kind}")
        if not terms:
            return {}
        for name, term in terms.items():
            if term.ndim:
                shape = list(term.shape)
                raise ValueError(
                    f"a term of the loss must be a single number, but {name} has shape {shape}"
                )
        if len(terms) == 1:
            total = next(iter(terms.values()))
        else:
            total = torch.stack(list(terms.values())).sum()
        return {**terms, "total": total}

    def batches(
        self, data: Samples, batch_size: int, generator: torch.Generator, drop_last: bool
    ) -> Batches:
        return shuffled_batches(
            data, batch_size, generator, no_single=self.mixes_samples, drop_last=drop_last
        )

    @cached_property
    def mixes_samples(self) -> bool:
        """True with batch normalisation, which cannot train on a batch of one sample."""
        kind = nn.modules.batchnorm._BatchNorm
        for module in self.modules:
            if any(isinstance(part, kind) for part in module.modules()):
                return True
        return False

    def session(self) -> AbstractContextManager[object]:
        """Return the context in which a training loop uses this step; here it does nothing."""
        return nullcontext()


class FusedStep(Step):
    """A step with `fused_linears`, which is faster on a CPU.

    Linear layers are updated while gradients are still computed, so none can be corrected.
    """

    def session(self) -> AbstractContextManager[object]:
        return fused_linears(self.model, self.optimizer)


class Proximal:
    """The correction for the loss plus (λ/2) · ‖w − c‖².

    It adds λ (w − c) to the gradient of each parameter. w are the parameters of ``model`` and c
    those of ``centre``, which has its architecture and may change between steps; ``strength`` is
    λ ≥ 0. The terms of the loss are without the distance.
    """

    def __init__(self, model: nn.Module, centre: nn.Module, strength: float) -> None:
        self.pairs = list(zip(model.parameters(), centre.parameters(), strict=True))
        self.strength = strength

    def __call__(self) -> None:
        for parameter, centre in self.pairs:
            if parameter.grad is not None:
                parameter.grad.add_(parameter - centre, alpha=self.strength)


def in_round(settings: Settings, number: int) -> TrainingSettings:
    """Return the settings of training with the learning rate of a round (``lr-schedule``).

    Rounds are counted from 1.
    """
    lr = settings.lr_in(number)
    if lr == settings.training.lr:
        return settings.training
    return replace(settings.training, lr=lr)


def make_optimizer(
    modules: Sequence[nn.Module], settings: TrainingSettings
) -> torch.optim.Optimizer:
    """Return the settings' optimizer for those parameters of the modules that are trained.

    On a CPU Adam is fused, which passes once over the weights in a step, not once for each
    operation.
    """
    parameters: list[nn.Parameter] = []
    for module in modules:
        parameters += [each for each in module.parameters() if each.requires_grad]
    lr = settings.lr
    weight_decay = settings.weight_decay
    if settings.optimizer != "adam":
        momentum = settings.momentum
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)

    fused = all(each.device.type == "cpu" and each.is_floating_point() for each in parameters)
    adam = torch.optim.Adam(
        parameters,
        lr=lr,
        weight_decay=weight_decay,
        capturable=any(each.is_cuda for each in parameters),  # steps are counted on the GPU
        fused=fused or None,  # None leaves the choice to PyTorch
    )
    if fused:
        adam.register_step_pre_hook(_fused_where_in_order)
    return adam


def _fused_where_in_order(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Turn Adam's fused step off for good if a weight or its gradient is not contiguous.

    The fused step pairs their numbers by the place in memory, so it would be wrong then.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            gradient = weight.grad
            if gradient is None:
                continue
            if not (weight.is_contiguous() and gradient.is_contiguous()):
                group["fused"] = False


def for_epochs(settings: TrainingSettings, epochs: int) -> TrainingSettings:
    """Return the settings for a training of ``epochs`` epochs.

    They replace ``local-epochs`` and ``local-steps`` of the run.
    """
    return replace(settings, local_epochs=epochs, local_steps=0)


def train(
    step: Step, data: Samples, settings: TrainingSettings, seed: int, checks: bool = True
) -> dict[str, float]:
    """Train the modules of ``step`` in place for ``local-epochs`` epochs.

    With ``local-steps`` it ends after as many batches instead. Returns the mean of each loss term
    and of their ``total`` over all samples seen. With ``checks``, TrainingError if a weight, or the
    loss of a step that is not private, is no longer finite.
    """
    seed_torch(seed)  # dropout
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Tensor] = {}
    samples_seen = 0
    steps_taken = 0
    limit = settings.local_steps  # 0: none, local-epochs count
    # with a limit of steps, epochs follow until it is reached, which without data it never is
    epochs = count() if limit and len(data) else range(settings.local_epochs)
    for module in step.modules:
        module.train()

    with step.session():
        for epoch in epochs:
            batches = step.batches(data, settings.batch_size, generator, settings.drop_last)
            steps_left = limit - steps_taken if limit else None
            for inputs, labels, index in islice(batches, steps_left):
                samples_seen += len(labels)
                steps_taken += 1
                for name, value in step(inputs, labels, index).items():
                    weighted = value.detach() * len(labels)
                    sums[name] = sums[name] + weighted if name in sums else weighted

            if checks and sums and not step.private and not torch.isfinite(sums["total"]):
                raise TrainingError(
                    f"the loss is no longer finite in local epoch {epoch + 1}; try a smaller lr"
                )
            if steps_taken == limit:
                break

    if checks:
        weights: list[tuple[str, Tensor]] = []
        for module in step.modules:
            weights += module.state_dict().items()
        check_finite(weights)
    return {name: value.item() / samples_seen for name, value in sums.items()}


def check_finite(weights: Sequence[tuple[str, Tensor]]) -> None:
    """Raise TrainingError, which names it, if one of the weights is not finite."""
    sums = torch.stack([value.sum(dtype=torch.float32) for _, value in weights])
    if bool(sums.isfinite().all()):
        return  # a NaN or an infinity would stay in its sum
    for name, value in weights:
        if not bool(value.isfinite().all()):
            raise TrainingError(f"{name} is no longer finite after training; try a smaller lr")


def shuffled_batches(
    data: Samples,
    batch_size: int,
    generator: torch.Generator,
    *,
    no_single: bool = False,
    drop_last: bool = False,
) -> Batches:
    """Yield the batches of one epoch: inputs, labels and indices, in a new random order.

    The last batch may be smaller. ``drop_last`` leaves a smaller one out, unless it is the only
    one. ``no_single`` joins a last batch of one sample to the one before it: batch normalisation
    cannot use it alone.
    """
    whole, rest = divmod(len(data), batch_size)
    sizes = [batch_size] * whole
    if rest and not (drop_last and sizes):
        if rest == 1 and no_single and sizes:
            sizes[-1] += 1
        else:
            sizes.append(rest)
    order = torch.randperm(len(data), generator=generator).to(data.labels.device)[: sum(sizes)]
    for rows in order.split(sizes):
        yield data.batch(rows, generator)
