"""Class moments of features, and the Gaussian classifier that follows from them in closed form.

It is linear discriminant analysis (LDA): the classes have one covariance. Symbols: x [F] features
of a sample; π_c the share of the samples that are of class c; m_c = (1/n) Σ_{i of c} x_i;
S = (1/n) Σ_i x_i x_iᵀ, of which the upper half is kept by rows, [F (F + 1) / 2].

Where a sample is of several classes, n is still the number of samples, and S counts it once for
each of its classes.

All are means over n samples, so the mean of several clients' moments, weighted by their n, is that
of all samples. With noise for differential privacy they are moments of no samples:
`ClassMoments.repair` makes them such.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# Of rounding, relative to the trace: a covariance with eigenvalues this far below 0 has none below.
TOLERANCE = 1e-6
LEAST_VARIANCE = 1e-9
SMALLEST_SHARE = 1e-300  # divides in the place of the share 0 of a class without samples


class ClassMoments(nn.Module):
    """π [C], m [C, F] and S, float64; a class without samples has zeros."""

    shares: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        half = width * (width + 1) // 2
        self.register_buffer("shares", torch.zeros(num_classes, dtype=torch.float64))
        self.register_buffer("first", torch.zeros(num_classes, width, dtype=torch.float64))
        self.register_buffer("second", torch.zeros(half, dtype=torch.float64))

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "ClassMoments":
        """Return moments that have the tensors of ``state``."""
        moments = cls(*state["first"].shape)
        for name, value in state.items():
            moments.register_buffer(name, value)
        return moments

    def measure(self, features_NF: Tensor, labels_N: Tensor, samples: int | None = None) -> None:
        """Set the shares π and the moments m and S to those of n samples; labels are in [0, C).

        Where a sample can be of several classes, ``features_NF`` and ``labels_N`` have a row for
        each class of each sample, and ``samples`` is n; None: n is the number of rows.
        """
        n = samples or len(labels_N)
        # in float64, on the CPU: sums of products of many samples
        x_NF = features_NF.double().cpu()
        one_hot_NC = nn.functional.one_hot(labels_N.cpu(), len(self.shares)).double()
        self.shares.copy_(one_hot_NC.sum(0) / n)
        self.first.copy_(one_hot_NC.T @ x_NF / n)
        self.second.copy_(_upper_half(x_NF.T @ x_NF / n))

    def repair(self, min_share: float, max_norm: float) -> None:
        """Change noisy moments, in place, to such as samples of norm up to ``max_norm`` can have.

        Classes with a share below ``min_share`` are removed, but never the largest; shares then add
        up to 1; the classes' means are cut to ``max_norm``; a negative eigenvalue of the covariance
        becomes 0.
        """
        is_kept_C = self.shares >= min_share
        is_kept_C[self.shares.argmax()] = True
        # divided by below: noise may have brought a share to 0 or less
        noisy_shares_C = self.shares.clamp(min=LEAST_VARIANCE)
        kept_shares_C = is_kept_C * noisy_shares_C
        shares_C = kept_shares_C / kept_shares_C.sum()

        means_CF = (self.first / noisy_shares_C[:, None]).renorm(2, 0, max_norm)
        self.shares.copy_(shares_C)
        self.first.copy_(shares_C[:, None] * means_CF)
        # the second moments are the covariance and a term of the means: they lose what it loses
        eigenvalues, eigenvectors = torch.linalg.eigh(self.covariance())
        negative_part = (eigenvectors * eigenvalues.clamp(max=0)) @ eigenvectors.mT
        self.second -= _upper_half(negative_part)

    def means(self) -> Tensor:
        """Return the classes' means μ_c = m_c / π_c, [C, F]."""
        return self.first / self.shares.clamp(min=SMALLEST_SHARE)[:, None]

    def covariance(self) -> Tensor:
        """Return the covariance within all classes: Σ = S − Σ_c m_c μ_cᵀ, [F, F]."""
        width = self.first.shape[1]
        rows, columns = torch.triu_indices(width, width)
        second_FF = self.second.new_zeros(width, width)
        second_FF[rows, columns] = self.second
        second_FF[columns, rows] = self.second
        return second_FF - self.first.T @ self.means()

    def over_classes(self, classes_of_a_sample: int) -> "ClassMoments":
        """Return the moments in which a sample counts once for each of its classes.

        Their shares add up to 1, as they do where each sample is of one class.
        """
        if classes_of_a_sample == 1:
            return self
        total = self.shares.sum()
        return ClassMoments.of({name: value / total for name, value in self.named_buffers()})

    def why_impossible(self, classes_of_a_sample: int = 1) -> str:
        """Say why no samples can have these moments; "" if some can.

        A sample is of at most ``classes_of_a_sample`` classes, and of at least one.
        """
        total = float(self.shares.sum())
        most = classes_of_a_sample
        adds_up = 1 - TOLERANCE <= total <= most * (1 + TOLERANCE)
        if bool((self.shares < 0).any()) or not adds_up:
            rest = "" if most == 1 else f" to {most}"
            return f"the shares of the classes must be at least 0 and add up to 1{rest}"
        if classes_of_a_sample > 1:
            # those that count a sample once for each class must be moments of samples of one class
            return self.over_classes(classes_of_a_sample).why_impossible()
        absent_C = self.shares == 0
        if self.first[absent_C].any():
            return "moments of a class without samples"
        covariance_FF = self.covariance()
        if not covariance_FF.isfinite().all():
            return "moments too large to be added"
        smallest_variance = torch.linalg.eigvalsh(covariance_FF).amin()
        scale = covariance_FF.trace().abs() + self.second.abs().amax()
        # rounding may bring a variance of 0 below it, by a part of the numbers that were subtracted
        if float(smallest_variance) >= -TOLERANCE * float(scale):
            return ""
        return "second moments by which a variance is below 0"

    def why_impossible_with_noise(self, noise: float, max_norm: float) -> str:
        """Say why noise cannot have made these moments from those of samples; "" if it can.

        The samples have norms up to ``max_norm``. Each number may be as large as they can make it,
        and ``noise`` times that larger. The moments are finite: NaN would pass as possible.
        """
        # shares, means and squares of features
        bounds = ((self.shares, 1.0), (self.first, max_norm), (self.second, max_norm**2))
        for value, bound in bounds:
            if float(value.abs().max()) > (1 + noise) * bound:
                return "moments beyond what samples and noise can bring"
        return ""


class GaussianHead(nn.Module):
    """A Gaussian classifier of features [B, F], with logits [B, C].

    They are log π_c − ½ (x − μ_c)ᵀ Σ⁻¹ (x − μ_c), without what is the same for all classes: so they
    are linear. Features longer than the buffer ``longest`` are cut to it.
    """

    weight: Tensor
    bias: Tensor
    longest: Tensor

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(num_classes))
        self.register_buffer("weight", torch.zeros(num_classes, width))
        self.register_buffer("longest", torch.tensor(torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        # features are cut to this length as those were whose moments the head is fitted to
        length_B1 = x.norm(dim=1, keepdim=True)
        x = x * (self.longest / length_B1).clamp(max=1)
        return x @ self.weight.T + self.bias

    def fit(
        self,
        moments: ClassMoments,
        counts_C: Tensor,
        priors_C: Tensor,
        shrinkage: float,
        combined: Callable[[Tensor], Tensor],
    ) -> None:
        """Become the classifier of these moments, of ``counts_C`` samples of each class.

        ``priors_C`` take the place of π_c; a class without samples is never predicted.
        ``shrinkage`` is that of `_shrunk_covariance`. ``combined`` makes outputs [N, O] of scores
        of the classes [N, C] (`Task.combined`).
        """
        means_CF = moments.means()
        within_FF = _shrunk_covariance(moments.covariance(), float(counts_C.sum()), shrinkage)
        log_priors_C = priors_C.double().log().masked_fill(moments.shares == 0, -torch.inf)
        weight_CF = torch.linalg.solve(within_FF, means_CF.T).T
        bias_C = log_priors_C - (weight_CF * means_CF).sum(1) / 2
        # logits are linear in weight and bias, so these are combined in their place
        self.weight.copy_(combined(weight_CF.T).T)
        self.bias.copy_(combined(bias_C[None])[0])


def _oracle_shrinkage(covariance_FF: Tensor, samples: float) -> float:
    """Return ρ of the oracle approximating shrinkage for n ``samples``.

    ρ = min(1, ((1 − 2/F) tr Σ² + tr² Σ) / ((n + 1 − 2/F) (tr Σ² − tr² Σ / F))): Chen et al.,
    "Shrinkage Algorithms for MMSE Covariance Estimation", IEEE TSP 2010, Eq. 23.
    """
    F = len(covariance_FF)
    trace_of_square = covariance_FF.square().sum()
    square_of_trace = covariance_FF.trace().square()
    numerator = (1 - 2 / F) * trace_of_square + square_of_trace
    denominator = (samples + 1 - 2 / F) * (trace_of_square - square_of_trace / F)
    if float(denominator) <= 0:  # Σ is a multiple of I, and shrinking does not change it
        return 1.0
    return min(1.0, float(numerator / denominator))


def _shrunk_covariance(covariance_FF: Tensor, samples: float, shrinkage: float) -> Tensor:
    """Return (1 − ρ) Σ + ρ (tr Σ / F) I for a covariance Σ of n ``samples``.

    ρ is ``shrinkage``, or `_oracle_shrinkage` where that is below 0. `TOLERANCE` of the mean
    variance, and `LEAST_VARIANCE`, are added to each variance: the result can then be inverted,
    even if a feature never varies.
    """
    rho = shrinkage if shrinkage >= 0 else _oracle_shrinkage(covariance_FF, samples)
    trace = float(covariance_FF.trace())
    F = len(covariance_FF)
    identity_part_F = covariance_FF.new_full((F,), rho * trace / F)
    identity_part_F = identity_part_F + LEAST_VARIANCE + TOLERANCE * trace / F
    return (1 - rho) * covariance_FF + torch.diag(identity_part_F)


def with_classes(
    moments: Mapping[str, Tensor], before: Sequence[str], now: Sequence[str]
) -> dict[str, Tensor]:
    """Return moments of the classes ``before`` as moments of ``now``, which has them and others.

    The tensors by class get rows of zeros for the other classes, and the order of ``now``. What
    else is in ``moments`` stays.
    """
    places = [now.index(name) for name in before]
    spread = dict(moments)
    for name in ("shares", "first"):
        value = moments[name]
        spread[name] = value.new_zeros(len(now), *value.shape[1:])
        spread[name][places] = value
    return spread


def _upper_half(symmetric_FF: Tensor) -> Tensor:
    """Return the upper half of a symmetric matrix, by rows: [F (F + 1) / 2].

    The diagonal is in it; the lower half has the same numbers once more.
    """
    rows, columns = torch.triu_indices(*symmetric_FF.shape)
    return symmetric_FF[rows, columns]


def off_diagonal_parts(width: int) -> Tensor:
    """Return √½ for each number of second moments that stands for two of a matrix, else 1.

    The second moments of ``width`` features are the upper half of a symmetric matrix, so a number
    beside the diagonal counts twice in the length of the matrix. The result is [F (F + 1) / 2].
    """
    # the upper half of a matrix with 1 on the diagonal and √½ beside it
    return _upper_half(torch.eye(width) + (1 - torch.eye(width)) / 2**0.5)
