"""The training loop. Every algorithm trains through it and gives it a loss, or a step of its own."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import count, islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from client_app.data import Samples
from protofl_common.basics.devices import seed_torch
from protofl_common.config.sections import TrainingSettings
from protofl_common.experiment.settings import Settings
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
    index: Tensor  # [B] int64: which samples of the training set they are, the same in every epoch and round
    features: Tensor  # z = f(x), [B, D]
    logits: Tensor  # g(z), [B, C]

    def only(self, mask_B: Tensor) -> "Batch":
        return Batch(*(value[mask_B] for value in vars(self).values()))


Loss = Callable[[Batch], LossTerms]  # Named scalar terms, whose sum is minimised; none: nothing to learn
COMPILER = "torch._dynamo"
Correction = Callable[[], None]  # Changes the gradients in place, before the optimizer takes its step along them


class GradientSums:
    """Sums of the gradients of ``parameters`` over all steps of a training, before any correction (SCAFFOLD)."""

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
    """One update of the weights by one batch: the gradients, their ``correction``, and a step of the ``optimizer``.

    Kinds of steps differ in the gradients (`PrivateStep`) or in the optimizer's part (`FusedStep`), and an algorithm
    brings its correction, so a corrected step can be private. The ``optimizer`` trains ``modules``; the first is the
    model, whose features and logits the ``loss`` gets.
    """

    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    loss: Loss
    correction: Correction | None = None
    gradient_sums: GradientSums | None = None
    private = False  # True for DP-SGD: the loop then says nothing of the loss, which is a function of single samples

    @property
    def model(self) -> nn.Module:
        return self.modules[0]

    def __call__(self, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """Update the weights; the terms of the loss before the update and, if there are any, their ``total``."""
        if terms := self.terms(self.model, inputs, labels, index):
            self.gradients(terms)
            self.descend()
        return terms

    def descend(self) -> None:
        if self.gradient_sums is not None:
            self.gradient_sums.add()
        if self.correction is not None:
            with torch.no_grad():
                self.correction()
        self.optimizer.step()

    def gradients(self, terms: LossTerms) -> None:
        for group in self.optimizer.param_groups:  # as its zero_grad, without an entry in PyTorch's profiler
            for parameter in group["params"]:
                parameter.grad = None
        terms["total"].backward()

    def terms(self, model: nn.Module, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """The loss of a batch under ``model``, with its ``total``."""
        assert isinstance(model, SplitModel)
        features = model.body(inputs)
        terms = self.loss(Batch(inputs, labels, index, features, model.head(features)))
        if not isinstance(terms, dict):
            raise TypeError(f"the loss must return a dictionary of named terms, not {type(terms).__name__}")
        if not terms:
            return {}  # nothing to learn from yet; batch normalisation has seen the batch all the same
        if odd := [f"{name} has shape {list(term.shape)}" for name, term in terms.items() if term.ndim]:
            raise ValueError(f"a term of the loss must be a single number, but {odd[0]}")
        total = torch.stack(list(terms.values())).sum() if len(terms) > 1 else next(iter(terms.values()))
        return {**terms, "total": total}

    def batches(self, data: Samples, batch_size: int, generator: torch.Generator, drop_last: bool) -> Batches:
        return shuffled_batches(data, batch_size, generator, no_single=self.mixes_samples, drop_last=drop_last)

    @cached_property
    def mixes_samples(self) -> bool:
        """True with batch normalisation, which cannot use a sample alone."""
        kind = nn.modules.batchnorm._BatchNorm
        return any(isinstance(part, kind) for module in self.modules for part in module.modules())

    def session(self) -> AbstractContextManager[object]:
        """In force while a training loop uses this step."""
        return nullcontext()


class FusedStep(Step):
    """The same with `fused_linears`, which is faster on a CPU: no moment is left in which to correct gradients."""

    def session(self) -> AbstractContextManager[object]:
        return fused_linears(self.model, self.optimizer)


class Proximal:
    """The correction for the loss plus (λ/2) · ‖w − c‖²: adds λ (w − c) to the gradient of each parameter.

    w are the parameters of ``model`` and c those of ``centre``, which has its architecture and may change between
    steps; ``strength`` is λ ≥ 0. The terms of the loss are without the distance.
    """

    def __init__(self, model: nn.Module, centre: nn.Module, strength: float) -> None:
        self.pairs = list(zip(model.parameters(), centre.parameters(), strict=True))
        self.strength = strength

    def __call__(self) -> None:
        for parameter, centre in self.pairs:
            if parameter.grad is not None:
                parameter.grad.add_(parameter - centre, alpha=self.strength)


def in_round(settings: Settings, number: int) -> TrainingSettings:
    """The settings of training with the learning rate of round ``number``, counted from 1 (``lr-schedule``)."""
    training, lr = settings.training, settings.lr_in(number)
    return training if lr == training.lr else replace(training, lr=lr)


def make_optimizer(modules: Sequence[nn.Module], settings: TrainingSettings) -> torch.optim.Optimizer:
    """The optimizer of the settings; Adam's step on a CPU passes once over the weights, not once for each operation."""
    _without_compiler()
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer != "adam":
        return torch.optim.SGD(parameters, lr=lr, momentum=settings.momentum, weight_decay=decay)
    fused = all(each.device.type == "cpu" and each.is_floating_point() for each in parameters)
    cuda = any(parameter.is_cuda for parameter in parameters)  # "capturable": steps are counted there
    adam = torch.optim.Adam(parameters, lr=lr, weight_decay=decay, capturable=cuda, fused=fused or None)
    if fused:
        adam.register_step_pre_hook(_fused_where_in_order)
    return adam


def _fused_where_in_order(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Turn the fused step off for good where weights or gradients are strided: it pairs numbers by place in memory."""
    for group in optimizer.param_groups:
        pairs = [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]
        in_order = all(weight.is_contiguous() and gradient.is_contiguous() for weight, gradient in pairs)
        group["fused"] = group["fused"] and in_order


def _without_compiler() -> None:
    """Give optimizers a stand-in for PyTorch's compiler, whose import takes 1.4 s; who needs it gets the real one."""

    def of_compiler(attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__path__":  # tools that look at all modules ask for these
            raise AttributeError(attribute)
        if sys.modules.get(COMPILER) is stand_in:
            del sys.modules[COMPILER]
        return getattr(import_module(COMPILER), attribute)

    stand_in = ModuleType(COMPILER)
    nothing = {"disable": lambda function, *_, **__: function, "graph_break": lambda: None}
    vars(stand_in).update(nothing, __getattr__=of_compiler)
    sys.modules.setdefault(COMPILER, stand_in)


def for_epochs(settings: TrainingSettings, epochs: int) -> TrainingSettings:
    """The settings of a training that takes ``epochs`` epochs, whatever ``local-epochs`` and ``local-steps`` say."""
    return replace(settings, local_epochs=epochs, local_steps=0)


def train(step: Step, data: Samples, settings: TrainingSettings, seed: int, checks: bool = True) -> dict[str, float]:
    """Train the modules of ``step`` in place for ``local-epochs`` epochs of batches of ``batch-size``.

    With ``local-steps`` it ends after as many batches. Returns the mean over all samples seen of each loss term and of
    their ``total``. With ``checks``, TrainingError if a weight, or the loss of a step not private, stops being finite.
    """
    seed_torch(seed)  # dropout
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Tensor] = {}
    seen = taken = 0
    limit = settings.local_steps
    passes = count() if limit and len(data) else range(settings.local_epochs)
    for module in step.modules:
        module.train()
    with step.session():
        for epoch in passes:
            batches = step.batches(data, settings.batch_size, generator, settings.drop_last)
            for inputs, labels, index in islice(batches, limit - taken if limit else None):
                seen, taken = seen + len(labels), taken + 1
                for name, value in step(inputs, labels, index).items():
                    weighted = value.detach() * len(labels)
                    sums[name] = sums[name] + weighted if name in sums else weighted
            if checks and sums and not step.private and not torch.isfinite(sums["total"]):
                raise TrainingError(f"the loss is no longer finite in local epoch {epoch + 1}; try a smaller lr")
            if taken == limit:
                break
    if checks:
        check_finite([pair for module in step.modules for pair in module.state_dict().items()])
    return {name: value.item() / seen for name, value in sums.items()}


def check_finite(weights: Sequence[tuple[str, Tensor]]) -> None:
    """TrainingError that names the first of the weights that is not finite."""
    if bool(torch.stack([value.sum(dtype=torch.float32) for _, value in weights]).isfinite().all()):
        return  # NaN and infinity stay in every sum
    for name, value in weights:
        if not bool(value.isfinite().all()):
            raise TrainingError(f"{name} is no longer finite after training; try a smaller lr")


def shuffled_batches(
    data: Samples, batch_size: int, generator: torch.Generator, *, no_single: bool = False, drop_last: bool = False
) -> Batches:
    """One epoch: inputs, labels and indices of the data in a new random order, in batches; the last may be smaller.

    ``drop_last`` leaves out a smaller last batch, unless it is the only one. ``no_single`` joins a last batch of one
    sample to the one before it: batch normalisation cannot use it alone.
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
