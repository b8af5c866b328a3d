"""What may be said of classes and predictions: of enough samples, or with noise."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from protofl_common.config.sections import PrivacySettings
from protofl_common.data.raw import DataError, Images, Inputs, Ints, are_images, described
from protofl_common.maths.gaussian import ClassMoments, off_diagonal_parts
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy.grid import LEAST_PART, STEPS, cut, to_steps, whole_noise
from protofl_common.tasks import Task

MOMENT_PARTS = {"shares": (1 / 6, 0), "first": (4 / 6, 1), "second": (1 / 6, 2)}
"""Class moments -> their part of a sample's squared length, the power of ``clip`` in their unit."""
STEPS_OF_FEATURES = 2**10
"""Steps in the length ``clip``, or a few more; products of whole numbers are whole ones again."""


# -- classes of enough samples -----------------------------------------------------------------
def rounded_count(right: int, samples: int, least: int) -> int:
    """Round a number of ``right`` predictions to a multiple of ``least``, ``samples`` at most.

    An exact number can tell whether a single sample was predicted right.
    """
    return min(samples, least * round(right / least))


def stated_samples(task: Task, labels: Ints, privacy: PrivacySettings) -> int:
    """Return how many training samples a client says that it has: those of its large classes.

    Samples without a label count too. Under ``dp`` all count: one sample more could make a class
    large, and the number grow by the whole class, which noise for one sample does not cover.
    """
    least = privacy.min_class_samples
    if privacy.dp != "none" or least <= 1:
        return len(labels)
    # the labels of all other classes become unknown
    labels_of_large = task.only_of(labels, task.large_classes(labels, least))
    is_of_small_N = task.known(labels) & ~task.known(labels_of_large)
    return int((~is_of_small_N).sum())


def large_enough(prototypes: Prototypes, least: int) -> Prototypes:
    """Return the prototypes, which must have counts, of at least ``least`` samples each.

    The clusters of fewer samples are merged to one for each class, which stays if it has enough. So
    a class of enough samples keeps a prototype. The result is sorted by label, unless all
    prototypes were large enough: then it is what was given.
    """
    counts = prototypes.counts
    assert counts is not None
    small = counts < least
    if not bool(small.any()):
        return prototypes
    sets = [prototypes.only(~small)]
    for label in prototypes.labels[small].unique():
        rows = small & (prototypes.labels == label)
        total = counts[rows].sum()
        if int(total) >= least:
            sums = (counts[rows].unsqueeze(1) * prototypes.means[rows]).sum(0, keepdim=True)
            sets.append(Prototypes(sums / total, label.view(1), total.view(1)))
    merged = Prototypes.joined(sets)
    return merged.only(merged.labels.argsort(stable=True))


def large_counts(counts_C: Tensor, least: int) -> Tensor:
    """Return the counts of classes [C], with 0 for those below ``least``."""
    return torch.where(counts_C < least, 0, counts_C)


# -- the noise of papers, which guarantees nothing ---------------------------------------------
def noised(values: Tensor, noise: str, seed: int) -> Tensor:
    """Return (1 − P) · values + e, with random e of scale S (FedPCL, Appendix A.4).

    ``noise`` is "gaussian S P" or "laplace S P". It follows from ``seed``, so it protects nothing.
    """
    kind, scale, part = noise.split()
    generator = np.random.default_rng(seed)
    draw = generator.normal if kind == "gaussian" else generator.laplace
    drawn = torch.from_numpy(draw(0.0, float(scale), tuple(values.shape))).to(values)
    return (1 - float(part)) * values + drawn


def noised_prototypes(prototypes: Prototypes, noise: str, seed: int) -> Prototypes:
    return replace(prototypes, means=noised(prototypes.means, noise, seed))


def noised_images(images: Inputs, noise: str, seed: int) -> Images:
    """Return images [N, channels, H, W] of bytes with noise, added on the scale -1..1.

    That is the scale of FedPCL's code; `noised` says what ``noise`` is. DataError for other inputs.
    """
    if not are_images(images):
        sample = described(images)
        raise DataError(
            f"image-noise = {noise!r}: only images take it; a sample is {sample}; set none"
        )
    values = noised(torch.from_numpy(images / np.float32(127.5) - 1), noise, seed)
    return np.asarray(((values + 1) * 127.5).round().clamp(0, 255).byte().numpy())


# -- differential privacy ----------------------------------------------------------------------
def fresh_draw() -> np.random.Generator:
    """Return a new generator for private noise, from the system's entropy.

    Private noise must not follow from a seed, nor from other noise: the state of NumPy's default
    generator, PCG64, can be found from its numbers (Bouillaguet et al., 2020).
    """
    return np.random.Generator(np.random.Philox())


def private_class_means(
    features_ND: Tensor,
    labels_N: Tensor,
    num_classes: int,
    clip: float,
    noise: float,
    draw: np.random.Generator,
) -> Prototypes:
    """Return class means and counts, from sums [C, D] and counts [C] of classes with noise.

    ``noise`` is the noise multiplier σ. A sample adds (its features cut to the length ``clip`` and
    divided by it, 1) / √2 to its class, of length 1 at most; features with NaN or infinity count as
    zeros. Features are summed as whole multiples of 1 / `STEPS`, counts as whole numbers, and the
    noise is of the same multiples (`grid.py`). What follows looks at the noisy table alone: classes
    whose count is below twice the noise's deviation are left out, but for the largest; means longer
    than ``clip`` are cut to it; counts add up to N at most.
    """
    # the rows below are not divided by √2; the noise is multiplied by it instead, which is the same
    deviation = math.sqrt(2) * noise
    steps_CD = torch.zeros(num_classes, features_ND.shape[1], dtype=torch.float64)
    steps_CD.index_add_(0, labels_N, to_steps(features_ND.double() / clip, STEPS))
    steps_CD += whole_noise(deviation * STEPS, tuple(steps_CD.shape), draw)
    noisy_C = labels_N.bincount(minlength=num_classes).double()
    noisy_C += whole_noise(deviation, (num_classes,), draw)

    counts_C = bounded_counts(noisy_C, len(labels_N))
    clear_C = (counts_C > 0) & (noisy_C >= 2 * deviation)
    clear_C[counts_C.argmax()] = True
    sums_PD = steps_CD[clear_C] / STEPS
    means_PD = clip * cut(sums_PD / noisy_C[clear_C, None].clamp(min=1))
    return Prototypes(means_PD.float(), clear_C.nonzero().flatten(), counts_C[clear_C])


def private_moments(
    moments: ClassMoments,
    features_NF: Tensor,
    labels_N: Tensor,
    clip: float,
    noise: float,
    draw: np.random.Generator,
) -> None:
    """Set ``moments`` in place to those of features cut to the length C = ``clip``, with noise.

    ``noise`` is the noise multiplier σ. A sample x of class c adds √p₀ to its class's count,
    √p₁ x/C to its sum and √p₂ xxᵀ/C² to the second moments (p of `MOMENT_PARTS`), of length
    √(p₀ + p₁ + p₂) = 1 at most, for ‖xxᵀ‖ = ‖x‖². Of the symmetric matrix one half is kept: there a
    number beside the diagonal stands for two, so √2 times the number gets noise of σ, and the
    number itself √½ of that. How many samples there are is public.

    x is a whole number of steps (`grid.py`), so xxᵀ is one of their square, and all sums are whole
    numbers below 2^53, which float64 adds exactly. Steps are powers of two, so that a secure sum,
    whose grid is one as well, adds up these numbers as they are.
    """
    samples = max(1, len(labels_N))
    step = step_of_features(clip)
    moments.measure(to_steps(features_NF.double() / clip, clip / step), labels_N)
    for name, value in moments.named_buffers():
        part, power = MOMENT_PARTS[name]
        unit = unit_of_moments(name, clip)
        if name == "shares":
            value /= unit  # to multiples of `unit`, as the other moments are already
        shape = tuple(value.shape)
        deviation = noise * clip**power / (unit * math.sqrt(part))
        drawn = whole_noise(deviation, shape, draw)
        if name == "second":
            weights = off_diagonal_parts(features_NF.shape[1])
            smaller = whole_noise(deviation * math.sqrt(1 / 2), shape, draw)
            drawn = torch.where(weights < 1, smaller, drawn)  # those beside the diagonal
        sums = (value * samples).round()  # `measure` has divided whole sums by the samples
        value.copy_((sums + drawn) * (unit / samples))


def unit_of_moments(name: str, clip: float) -> float:
    """Return the step of the grid for one kind of class moments, a key of `MOMENT_PARTS`.

    The sums behind these moments, and their noise, are whole multiples of it.
    """
    if name == "shares":
        return 1 / STEPS_OF_FEATURES
    _, power = MOMENT_PARTS[name]
    unit: float = step_of_features(clip) ** power
    return unit


def finest_unit_of_moments(clip: float) -> float:
    """Return the step of which all class moments, and all whole numbers, are whole multiples."""
    return min(1.0, *(unit_of_moments(name, clip) for name in MOMENT_PARTS))


def step_of_features(clip: float) -> float:
    """Return the step to which features of the length ``clip`` are rounded: a power of two."""
    power_of_two: float = 2.0 ** math.floor(math.log2(clip))
    return power_of_two / STEPS_OF_FEATURES


def count_noise(noise: float) -> float:
    """Return the standard deviation of the noise that `private_moments` adds to a class's count.

    ``noise`` is the multiplier σ, the deviation for a sum to which a sample adds √p₀. To a count it
    adds 1, so the deviation is σ / √p₀. With features cut to the length 1 no number of the other
    sums there gets more noise, as no other part of `MOMENT_PARTS` is smaller.
    """
    part_of_squared_length, _ = MOMENT_PARTS["shares"]  # p₀
    return noise / math.sqrt(part_of_squared_length)


def private_counts(counts_C: Tensor, noise: float, draw: np.random.Generator) -> Tensor:
    """Return counts [C] of samples with noise of the multiplier ``noise``, as whole numbers.

    Each sample adds 1 to one of the counts, so σ is the noise's deviation. The number of all
    samples is public: the result adds up to that at most.
    """
    noisy_C = counts_C.double() + whole_noise(noise, (len(counts_C),), draw)
    return bounded_counts(noisy_C, int(counts_C.sum()))


def bounded_counts(noisy_C: Tensor, samples: int) -> Tensor:
    """Turn noisy counts [C] into whole ones that a client could have, by scaling and rounding.

    None is negative, and they add up to ``samples`` at most; the largest is at least 1, so that a
    client always has a class.
    """
    positive_C = noisy_C.clamp(min=0)
    total = float(positive_C.sum())
    scaled_C = positive_C * min(1.0, samples / max(1.0, total))  # never scaled up
    whole_C = scaled_C.round()
    if float(whole_C.sum()) > samples:  # rounding has raised too many
        whole_C = scaled_C.floor()
    counts_C = whole_C.long()
    largest = noisy_C.argmax()
    counts_C[largest] = max(1, int(counts_C[largest]))  # if it was 0, so are all others
    return counts_C


def private_correct(
    correct: Mapping[str, int],
    samples: int,
    noise: float,
    draw: np.random.Generator,
    part: float = 1.0,
) -> dict[str, int]:
    """Return K numbers of right predictions, by the way to predict, with whole noise.

    ``noise`` is the noise multiplier: a sample adds 1 to each number at most, so √K to the length
    of their vector. Results are cut to 0 and ``samples``. Where several clients share the noise of
    a secure sum, this one adds a ``part`` below 1 of its deviation, and nothing is cut, as what is
    cut would not add up.
    """
    is_shared = part < 1
    deviation = math.sqrt(len(correct)) * noise  # √K σ
    if is_shared:
        deviation = max(part * deviation, LEAST_PART)
    drawn = whole_noise(deviation, (len(correct),), draw).tolist()
    noisy_correct = {}
    for (kind, exact), whole in zip(correct.items(), drawn, strict=True):
        noisy = int(exact + whole)
        if not is_shared:
            noisy = min(max(noisy, 0), samples)
        noisy_correct[kind] = noisy
    return noisy_correct
