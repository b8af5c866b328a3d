"""DP-SGD: a training step whose result says little of any one sample."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from client_app.learning.data import Samples
from client_app.learning.training import Batches, LossTerms, Step
from protofl_common.config.options import SettingsError
from protofl_common.models.devices import seed_torch
from protofl_common.privacy.grid import STEPS, longest_before_rounding, whole_noise
from protofl_common.privacy.persons import Persons, sizes_in_groups
from protofl_common.privacy.plan import Plan
from protofl_common.privacy.release import fresh_draw
from protofl_common.privacy.released import Released

NUMBERS_AT_ONCE = 2**24  # In all gradients of single samples that are in memory: 64 MiB
ADDED_EXACTLY = 2**24 // STEPS  # So many numbers up to STEPS add up exactly in float32
SAMPLES_OF_A_PERSON = 16
"""The most in a step: memory is needed for the gradients of all of them at once."""
PART = 1024  # Squares that float32 adds at a time
FLOAT32_LENGTHS = 2**-13  # The largest relative error of a length: PART roundings of its square
Gradients = dict[str, Tensor]  # By the name of the weight


@dataclass(eq=False)
class PrivateStep(Step):
    """A step of DP-SGD.

    Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.

    Symbols: g_i gradient of the loss of sample i alone, over all modules; C = ``dp-clip``; σ the
    noise multiplier; q the rate at which samples are drawn, each by itself; N training samples.
    With `persons` (``dp = "person"``) they are drawn in place of samples, N is their number, and
    g_i the mean gradient of person i's samples, of `SAMPLES_OF_A_PERSON` of them drawn anew if
    there are more.

        ḡ = 1/(q·N) · ( Σ_{i drawn} g_i · min(1, C / ‖g_i‖) + N(0, σ² C² I) )

    Each cut gradient and the noise are whole numbers of C / `STEPS`, so ḡ is a whole number of a
    step that depends on settings alone (`protofl_common/privacy/grid.py`). What follows, the
    optimizer and the weights that leave, is computed from such ḡ and from what was sent.

    The loss of a sample is that of a batch of one, so no sample shapes another's gradient, whatever
    the loss. A gradient with NaN or infinity, or whose length overflows, counts as zero: neither
    passes a clip. Who was drawn, the noise, dropout and ``augment`` come from the system's entropy:
    from the run's seed a server could tell at which place of a batch a sample was. An optimizer's
    momentum and weight decay follow from ḡ.

    SettingsError for batch normalisation, in which samples shape each other's features, and for a
    network that changes buffers while it trains: these would leave without noise.
    """

    plan: Plan = field(kw_only=True)
    released: Released | None = field(default=None, kw_only=True)
    """What may leave, to which trained modules are added; None for ``gradient-noise``, which no
    ledger pays for."""
    persons: Persons | None = field(default=None, kw_only=True)
    """The persons that the training samples are of; None: each sample is another person's."""
    sizes: Sequence[int] | None = None
    """How many samples each person has in the present batch; None: one each."""
    private = True
    empty = False  # Whether nobody was drawn into the present batch (`batches`)

    def __post_init__(self) -> None:
        if self.mixes_samples:
            raise SettingsError(
                "norm = 'batch': this network has batch normalisation, which mixes samples; "
                "set group"
            )
        self.draw = fresh_draw()
        self.alone = nn.ModuleList(self.modules)
        # `functional_call` takes modules only: what this one gives is the loss of a single sample
        self.alone.forward = self._loss_of_one

    def _loss_of_one(self, *sample: Tensor) -> Tensor:
        batch_of_one = [part[None] for part in sample]
        return self.terms(self.model, *batch_of_one)["total"]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Permit the modules to leave with the weights that they have after the block.

        So are the sums of their gradients, if there are any. Raises SettingsError for modules that
        something other than a private step has changed before.
        """
        if self.released is None:
            yield
            return
        self.released.check(self.released.covers([*self.modules]))
        yield
        self.released.add([*self.modules])
        if self.gradient_sums is not None:
            self.released.add([self.gradient_sums.totals, self.gradient_sums.steps])

    def batches(
        self, data: Samples, batch_size: int, generator: torch.Generator, drop_last: bool
    ) -> Batches:
        """Yield the batches of an epoch; each person is in a batch with probability q.

        Sets `sizes` and `empty` for each batch. Where nobody is drawn, the batch has the first
        person and `empty` is True: the gradient then counts as zero, and noise is added as always.
        Number and size of batches come from the plan, so ``batch_size`` and ``drop_last`` have no
        effect. SettingsError for data that are not all training samples.
        """
        persons = self.persons or Persons.one_per_sample(len(data))
        if self.released is not None:
            self.released.check(persons.samples == len(data))
        seed_torch(generator.seed())  # from the system's entropy, as no server may know the draws
        for _ in range(self.plan.batches):
            drawn = np.flatnonzero(self.draw.random(len(persons)) < self.plan.rate)
            self.empty = len(drawn) == 0
            if self.empty:
                drawn = np.zeros(1, np.int64)
            rows, self.sizes = persons.rows_of(drawn, SAMPLES_OF_A_PERSON, self.draw)
            yield data.batch(torch.from_numpy(rows).to(data.labels.device), generator)

    def __call__(self, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """Take a private step on a batch, and return its loss terms, which must not leave.

        SettingsError for a network that changes buffers, such as running statistics.
        """
        buffers_before = {name: value.clone() for name, value in self.alone.named_buffers()}
        terms = self.terms(self.model, inputs, labels, index)
        for name, value in self.alone.named_buffers():
            if not torch.equal(value, buffers_before[name]):
                raise SettingsError(
                    f"dp = {self.plan.privacy.dp!r}: this network changes {name} while it trains,"
                    " without noise"
                )
        if terms:
            weights = self._trained_weights()
            self._release(weights, self._sums(weights, (inputs, labels, index)))
        return terms

    def _trained_weights(self) -> dict[str, nn.Parameter]:
        """Return all weights that train, by name; each of them gets noise.

        Which of them a batch touches could tell who is in it: a network may send its inputs to one
        of several parts.
        """
        named = self.alone.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    def _sums(self, weights: Mapping[str, nn.Parameter], batch: tuple[Tensor, ...]) -> Gradients:
        """Return the sum over persons of their gradients, each cut to the length C.

        Gradients of single samples need much memory, so the batch is taken in parts, of as many
        samples as `NUMBERS_AT_ONCE` allows. No person is divided between two parts.
        """
        sums = dict.fromkeys(weights, torch.zeros(()))  # the first part makes them tensors [...]
        num_weights = sum(weight.numel() for weight in weights.values())
        most_samples = max(1, NUMBERS_AT_ONCE // num_weights)
        samples_of_persons = self.sizes or [1] * len(batch[0])
        persons_of_parts = [*sizes_in_groups(samples_of_persons, most_samples)]
        samples_in_parts = [sum(sizes) for sizes in persons_of_parts]
        inputs_labels_index = [values.split(samples_in_parts) for values in batch]
        parts = zip(*inputs_labels_index, strict=True)
        for sizes, samples in zip(persons_of_parts, parts, strict=True):
            gradients = _means(self._of_each(weights, samples), sizes)
            for name, total in self._cut(gradients).items():
                sums[name] = sums[name] + total
        return sums

    def _of_each(self, weights: Mapping[str, Tensor], samples: tuple[Tensor, ...]) -> Gradients:
        """Return the gradients of the B samples, [B, …] for every weight."""
        weights = {name: weight.detach() for name, weight in weights.items()}
        gradient_of_sample = grad(partial(functional_call, self.alone))
        gradients_of_all = vmap(gradient_of_sample, in_dims=(None, 0), randomness="different")
        try:
            gradients: Gradients = gradients_of_all(weights, samples)
            return gradients
        except RuntimeError:
            # vmap can do neither recurrent layers nor code that looks at single numbers
            each = [gradient_of_sample(weights, sample) for sample in zip(*samples, strict=True)]
            return {name: torch.stack([gradients[name] for gradients in each]) for name in weights}

    def _cut(self, gradients: Gradients) -> Gradients:
        """Return the sum of gradients [B, …], each cut to the length C, in steps of C / `STEPS`.

        B is the number of persons. A gradient without a finite length counts as zero, and so do all
        where nobody was drawn. The gradients are changed in place.
        """
        numbers = sum(gradient[0].numel() for gradient in gradients.values())
        # of C: rounding to steps, and the error of float32 lengths, must not make a gradient longer
        longest = longest_before_rounding(numbers, STEPS) * (1 - FLOAT32_LENGTHS)
        lengths_B = _lengths(
            [gradient.reshape(len(gradient), -1) for gradient in gradients.values()]
        )
        steps_in_c = STEPS / self.plan.privacy.dp_clip  # the factor of a gradient that is not cut
        # the clamp is for a length of 0: its gradient, all zeros, is not cut
        factors_B = (longest * STEPS / lengths_B.clamp(min=1e-30)).clamp(max=steps_in_c)
        if self.empty:
            factors_B = torch.zeros_like(factors_B)
        factors_B = torch.where(lengths_B.isfinite(), factors_B, 0.0).float()
        all_are_finite = bool(lengths_B.isfinite().all())
        sums = {}
        for name, gradient in gradients.items():
            # of a weight that the loss does not touch, all numbers are one zero in memory
            own_numbers = gradient.contiguous()
            if not all_are_finite:
                own_numbers.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # 0·∞ would be NaN
            factors = factors_B.view(-1, *[1] * (gradient.dim() - 1))  # [B, 1, …]
            sums[name] = _exact_sum(own_numbers.mul_(factors).round_())
        return sums

    def _release(self, weights: Mapping[str, nn.Parameter], sums: Gradients) -> None:
        """Add noise to the sums, and take the optimizer's step along ḡ.

        SettingsError for more steps than the ledger was charged for. A correction of the gradient
        (`descend`) must not depend on the samples.
        """
        if self.released is not None:
            self.released.use("step")
        self.optimizer.zero_grad(set_to_none=True)
        step = self.plan.privacy.dp_clip / STEPS
        expected_persons = self.plan.rate * self.plan.samples  # q·N
        for name, weight in weights.items():
            noise = whole_noise(self.plan.noise * STEPS, tuple(weight.shape), self.draw)
            noisy_sum = sums[name] + noise.to(sums[name])
            weight.grad = (noisy_sum * (step / expected_persons)).to(weight)
        self.descend()


def _means(gradients: Gradients, sizes: Sequence[int]) -> Gradients:
    """Return the mean gradient [P, …] of each person from those of samples [B, …].

    ``sizes`` says how many samples each person has; they stand one after the other.
    """
    if max(sizes) == 1:
        return gradients
    means = {}
    for name, gradient in gradients.items():
        of_persons = gradient.split([*sizes])
        means[name] = torch.stack([of_person.mean(0) for of_person in of_persons])
    return means


def _lengths(parts: Sequence[Tensor]) -> Tensor:
    """Return the lengths [B] float64 of B gradients, whose numbers are divided into ``parts``.

    Each part is [B, any number]. A length is infinite or NaN where one of the numbers is. float32
    adds at most `PART` squares at a time, so that its error stays within `FLOAT32_LENGTHS`.
    """
    lengths = []
    for part_BE in parts:
        whole = part_BE.shape[1] // PART * PART  # the columns that fill groups of PART
        lengths += [
            part_BE[:, :whole].unflatten(1, (-1, PART)).norm(dim=2).double(),
            part_BE[:, whole:].norm(dim=1, keepdim=True).double(),
        ]
    lengths_B: Tensor = torch.cat(lengths, dim=1).norm(dim=1)
    return lengths_B


def _exact_sum(steps: Tensor) -> Tensor:
    """Return the sum [...] float64 of whole numbers [B, …] float32, up to `STEPS` large.

    float32 adds `ADDED_EXACTLY` of them without rounding.
    """
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for few in steps.split(ADDED_EXACTLY):
        total = total + few.sum(0).to(total)
    return total
