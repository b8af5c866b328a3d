"""Class moments of features, and the Gaussian classifiers that follow from them in closed form.

Symbols: x [F] features of a sample; π_c the share of the samples that are of class c;
m_c = (1/n) Σ_{i of c} x_i; S second moments, as the head needs them:

    naive-bayes   S_c = (1/n) Σ_{i of c} x_i²          [C, F]
    lda           S = (1/n) Σ_i x_i x_iᵀ               [F (F + 1) / 2], the upper half by rows
    qda           S_c = (1/n) Σ_{i of c} x_i x_iᵀ      [C, F (F + 1) / 2]

Where a sample is of several classes, n is still the number of samples, and S counts it once for
each of its classes.

All are means over n samples, so the mean of several clients' moments, weighted by their n, is that
of all samples. With noise for differential privacy they are moments of no samples:
`ClassMoments.repair` makes them such.
"""

from collections.abc import Callable, Mapping

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

    def __init__(self, num_classes: int, width: int, head: str) -> None:
        super().__init__()
        half = width * (width + 1) // 2
        shape_of_second = {
            "naive-bayes": (num_classes, width),
            "lda": (half,),
            "qda": (num_classes, half),
        }[head]
        self.register_buffer("shares", torch.zeros(num_classes, dtype=torch.float64))
        self.register_buffer("first", torch.zeros(num_classes, width, dtype=torch.float64))
        self.register_buffer("second", torch.zeros(shape_of_second, dtype=torch.float64))

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "ClassMoments":
        """Return the moments with these tensors, whose shapes say the kind of head."""
        num_classes, width = state["first"].shape
        moments = cls(num_classes, width, "lda")  # any kind would do: all tensors are replaced
        for name, value in state.items():
            moments.register_buffer(name, value)
        return moments

    @property
    def _is_diagonal(self) -> bool:
        """Whether S has the squares of single features only (naive-bayes)."""
        return self.second.shape == self.first.shape

    @property
    def _is_shared(self) -> bool:
        """Whether S is of all classes together (lda)."""
        return self.second.dim() == 1

    def measure(self, features_NF: Tensor, labels_N: Tensor, samples: int | None = None) -> None:
        """Set shares π, means m and second moments S to those of these n samples.

        If they are of several classes, they have a row for each, and ``samples`` is n.
        """
        n = samples or len(labels_N)
        # in float64, on the CPU: sums of products of many samples
        x_NF = features_NF.double().cpu()
        labels_N = labels_N.cpu()
        one_hot_NC = nn.functional.one_hot(labels_N, len(self.shares)).double()
        self.shares.copy_(one_hot_NC.sum(0) / n)
        self.first.copy_(one_hot_NC.T @ x_NF / n)
        if self._is_diagonal:
            self.second.copy_(one_hot_NC.T @ x_NF.square() / n)
        elif self._is_shared:
            self.second.copy_(_half(x_NF.T @ x_NF / n))
        else:
            for label in labels_N.unique().tolist():
                of_class_NF = x_NF[labels_N == label]
                self.second[label] = _half(of_class_NF.T @ of_class_NF / n)

    def repair(self, least: float, longest: float) -> None:
        """Replace moments with noise by those that samples no longer than ``longest`` can have.

        Classes with a share below ``least`` go, but for the largest; shares add up to 1; means are
        cut to ``longest``; a covariance has no eigenvalue below 0.
        """
        is_left_C = self.shares >= least
        is_left_C[self.shares.argmax()] = True
        noisy_C = self.shares.clamp(min=LEAST_VARIANCE)
        left_C = is_left_C * noisy_C
        shares_C = left_C / left_C.sum()

        if not self._is_shared:
            self.second *= (shares_C / noisy_C)[:, None]
        means_CF = (self.first / noisy_C[:, None]).renorm(2, 0, longest)
        self.shares.copy_(shares_C)
        self.first.copy_(shares_C[:, None] * means_CF)
        if self._is_diagonal:
            self.second.copy_(self.second.maximum(self.first * means_CF))
            return

        values, vectors = torch.linalg.eigh(self.covariances())
        below_0 = (vectors * values.clamp(max=0)[..., None, :]) @ vectors.mT
        if self._is_shared:
            self.second -= _half(below_0)
        else:
            self.second -= shares_C[:, None] * _half(below_0)

    def means(self) -> Tensor:
        """μ_c = m_c / π_c, [C, F]."""
        return self.first / self.shares.clamp(min=SMALLEST_SHARE)[:, None]

    def covariances(self) -> Tensor:
        """Return Σ; a class without samples has zeros.

        Of each class it is S_c / π_c − μ_c μ_cᵀ, [C, F] for naive-bayes, [C, F, F] for qda; within
        all classes S − Σ_c m_c μ_cᵀ, [F, F] for lda.
        """
        means_CF = self.means()
        shares_C1 = self.shares.clamp(min=SMALLEST_SHARE)[:, None]
        if self._is_diagonal:
            return (self.second / shares_C1 - means_CF.square()).clamp(min=0)

        width = self.first.shape[1]
        rows, columns = torch.triu_indices(width, width)
        second = self.second.new_zeros(*self.second.shape[:-1], width, width)
        second[..., rows, columns] = self.second
        second[..., columns, rows] = self.second
        if self._is_shared:
            return second - self.first.T @ means_CF
        return second / shares_C1[:, :, None] - means_CF[:, :, None] * means_CF[:, None, :]

    def over_classes(self, classes_of_a_sample: int) -> "ClassMoments":
        """Return the moments in which a sample counts once for each of its classes.

        Their shares add up to 1, as they do where each sample is of one class.
        """
        if classes_of_a_sample == 1:
            return self
        total = self.shares.sum()
        return ClassMoments.of({name: value / total for name, value in self.named_buffers()})

    def why_impossible(self, classes_of_a_sample: int = 1) -> str:
        """Say why no samples, of so many classes each at most, can have these moments; or ""."""
        total = float(self.shares.sum())
        if bool((self.shares < 0).any()) or total < 1 - TOLERANCE:
            return "the shares of the classes must be at least 0 and add up to 1"
        if total > classes_of_a_sample * (1 + TOLERANCE):
            return f"the shares of the classes must add up to {classes_of_a_sample} at most"
        if classes_of_a_sample > 1:
            return self.over_classes(classes_of_a_sample).why_impossible()
        absent_C = self.shares == 0
        if self.first[absent_C].any():
            return "moments of a class without samples"
        if not self._is_shared and self.second[absent_C].any():
            return "moments of a class without samples"

        if self._is_diagonal:
            squares = self.second * self.shares[:, None]
            least = (squares - self.first.square()).amin()
            size = squares.abs().amax()
        else:
            covariances = self.covariances()
            if not covariances.isfinite().all():
                return "moments too large to be added"
            traces = covariances.diagonal(dim1=-2, dim2=-1).sum(-1)
            least = torch.linalg.eigvalsh(covariances).amin()
            size = traces.abs().amax() + self.second.abs().amax()
        if float(least) >= -TOLERANCE * float(size):
            return ""
        return "second moments by which a variance is below 0"

    def problem_with_noise(self, noise: float, longest: float) -> str:
        """`why_impossible` of samples up to ``longest`` and noise of ``noise`` times a number.

        Each number is measured by the largest that such samples can bring.
        """
        for value, size in ((self.shares, 1.0), (self.first, longest), (self.second, longest**2)):
            if float(value.abs().max()) > (1 + noise) * size:
                return "moments beyond what samples and noise can bring"
        return ""


class GaussianHead(nn.Module):
    """log π_c − ½ log |Σ_c| − ½ (x − μ_c)ᵀ Σ_c⁻¹ (x − μ_c): [B, F] to logits [B, C].

    Linear for ``lda``, where it leaves out what is the same for all classes.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    precision: Tensor
    longest: Tensor

    def __init__(self, num_classes: int, width: int, head: str) -> None:
        super().__init__()
        self.kind = head
        self.register_buffer("bias", torch.zeros(num_classes))
        if head == "lda":
            self.register_buffer("weight", torch.zeros(num_classes, width))
        else:
            sizes = (width,) if head == "naive-bayes" else (width, width)
            self.register_buffer("mean", torch.zeros(num_classes, width))
            self.register_buffer("precision", torch.zeros(num_classes, *sizes))
        self.register_buffer("longest", torch.tensor(torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        # no longer than the samples of its moments
        length_B1 = x.norm(dim=1, keepdim=True)
        x = x * (self.longest / length_B1).clamp(max=1)
        if self.kind == "lda":
            return x @ self.weight.T + self.bias
        away_BCF = x[:, None, :] - self.mean
        if self.kind == "naive-bayes":
            distance_BC = (away_BCF.square() * self.precision).sum(2)
        else:
            distance_BC = torch.einsum("bcf,cfg,bcg->bc", away_BCF, self.precision, away_BCF)
        return self.bias - distance_BC / 2

    def fit(
        self,
        moments: ClassMoments,
        counts_C: Tensor,
        priors_C: Tensor,
        shrinkage: float,
        combined: Callable[[Tensor], Tensor],
    ) -> None:
        """Become the classifier of these moments.

        ``combined`` makes outputs [N, O] of scores of the classes [N, C] (`Task.combined`). But for
        ``lda``, a class's covariance is smoothed: the one within all classes counts in it as one
        more sample.
        """
        means_CF = moments.means()
        covariances = moments.covariances()
        log_priors_C = priors_C.double().log().masked_fill(moments.shares == 0, -torch.inf)
        if self.kind == "lda":
            within = shrunk(covariances, float(counts_C.sum()), shrinkage)
            weight_CF = torch.linalg.solve(within, means_CF.T).T
            bias_C = log_priors_C - (weight_CF * means_CF).sum(1) / 2
            self.weight.copy_(combined(weight_CF.T).T)
            self.bias.copy_(combined(bias_C[None])[0])
            return

        is_diagonal = self.kind == "naive-bayes"
        shape = (-1, 1) if is_diagonal else (-1, 1, 1)
        n_C = counts_C.double().reshape(shape)
        within = (moments.shares.reshape(shape) * covariances).sum(0)
        smoothed = (n_C * covariances + within) / (n_C + 1)
        of_classes = []
        for covariance, n in zip(smoothed, n_C, strict=True):
            of_classes.append(shrunk(covariance, float(n), shrinkage))
        covariances = torch.stack(of_classes)
        if is_diagonal:
            log_volume_C = covariances.log().sum(1)
            precision = 1 / covariances
        else:
            log_volume_C = torch.logdet(covariances)
            precision = torch.linalg.inv(covariances)
        self.mean.copy_(means_CF)
        self.precision.copy_(precision)
        self.bias.copy_(log_priors_C - log_volume_C / 2)


def shrunk(covariance: Tensor, samples: float, shrinkage: float) -> Tensor:
    """(1 − ρ) Σ + ρ (tr Σ / F) I of a covariance [F, F], or of variances [F]; ρ = ``shrinkage``.

    Below 0, ρ is the oracle approximating shrinkage of so many samples (Chen et al., "Shrinkage
    Algorithms for MMSE Covariance Estimation", IEEE TSP 2010, Eq. 23):
    ρ = min(1, ((1 − 2/F) tr Σ² + tr² Σ) / ((n + 1 − 2/F) (tr Σ² − tr² Σ / F))). A millionth of the
    mean variance is added, for features that never vary.
    """
    F = len(covariance)
    is_diagonal = covariance.dim() == 1
    trace = covariance.sum() if is_diagonal else covariance.trace()
    rho = shrinkage
    if shrinkage < 0:
        trace_of_square = covariance.square().sum()
        square_of_trace = trace.square()
        numerator = (1 - 2 / F) * trace_of_square + square_of_trace
        denominator = (samples + 1 - 2 / F) * (trace_of_square - square_of_trace / F)
        rho = min(1.0, float(numerator / denominator)) if float(denominator) > 0 else 1.0

    identity_part_F = covariance.new_full((F,), rho * float(trace) / F)
    identity_part_F = identity_part_F + LEAST_VARIANCE + TOLERANCE * float(trace) / F
    if is_diagonal:
        return (1 - rho) * covariance + identity_part_F
    return (1 - rho) * covariance + torch.diag(identity_part_F)


def _half(symmetric: Tensor) -> Tensor:
    """The upper half of symmetric matrices [..., F, F], by rows: [..., F (F + 1) / 2].

    The diagonal is in it; the lower half is the same numbers once more.
    """
    rows, columns = torch.triu_indices(*symmetric.shape[-2:])
    return symmetric[..., rows, columns]


def off_diagonal_parts(shape: torch.Size, width: int) -> Tensor:
    """Return √½ where numbers of second moments of this shape stand for two of a matrix, else 1."""
    if shape[-1] == width:
        return torch.ones(width)
    return _half(torch.eye(width) + (1 - torch.eye(width)) / 2**0.5)
