"""Class moments of features, and the Gaussian classifiers that follow from them in closed form.

Symbols: x [F] features of a sample; π_c the share of the samples that are of class c; m_c = (1/n) Σ_{i of c} x_i;
S second moments, as the head needs them:

    naive-bayes   S_c = (1/n) Σ_{i of c} x_i²          [C, F]
    lda           S = (1/n) Σ_i x_i x_iᵀ               [F (F + 1) / 2], the upper half by rows
    qda           S_c = (1/n) Σ_{i of c} x_i x_iᵀ      [C, F (F + 1) / 2]

All are means over n samples, so the mean of several clients' moments, weighted by their n, is that of all samples.
With noise for differential privacy they are moments of no samples: `ClassMoments.repair` makes them such.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

TOLERANCE = 1e-6  # of rounding, relative to the trace, within which a covariance counts as positive semi-definite
LEAST_VARIANCE = 1e-9


class ClassMoments(nn.Module):
    """π [C], m [C, F] and S, float64; a class without samples has zeros."""

    shares: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, num_classes: int, width: int, head: str) -> None:
        super().__init__()
        half = width * (width + 1) // 2
        second = {"naive-bayes": (num_classes, width), "lda": (half,), "qda": (num_classes, half)}[head]
        for name, shape in (("shares", (num_classes,)), ("first", (num_classes, width)), ("second", second)):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "ClassMoments":
        """The moments with these tensors, of which the shapes say the kind."""
        num_classes, width = state["first"].shape
        moments = cls(num_classes, width, "lda")
        for name, value in state.items():
            moments.register_buffer(name, value)
        return moments

    def measure(self, features_NF: Tensor, labels_N: Tensor) -> None:
        """Set all three to those of N samples."""
        x_NF, n = features_NF.double().cpu(), len(labels_N)
        one_hot_NC = nn.functional.one_hot(labels_N.cpu(), len(self.shares)).double()
        self.shares.copy_(one_hot_NC.mean(0))
        self.first.copy_(one_hot_NC.T @ x_NF / n)
        if self.second.shape == self.first.shape:
            self.second.copy_(one_hot_NC.T @ x_NF.square() / n)
        elif self.second.dim() == 1:
            self.second.copy_(_half(x_NF.T @ x_NF / n))
        else:
            for label in labels_N.unique().tolist():
                of_class_NF = x_NF[labels_N.cpu() == label]
                self.second[label] = _half(of_class_NF.T @ of_class_NF / n)

    def repair(self, least: float, longest: float) -> None:
        """Replace moments with noise by those that samples of length ``longest`` at most can have.

        Classes with a share below ``least`` go, but for the largest; shares add up to 1; means are cut to ``longest``;
        a covariance has no eigenvalue below 0.
        """
        left_C, positive_C = self.shares >= least, self.shares.clamp(min=LEAST_VARIANCE)
        left_C[self.shares.argmax()] = True
        present_C = left_C * positive_C / (left_C * positive_C).sum()
        if self.second.dim() > 1:
            self.second *= (present_C / positive_C)[:, None]
        means_CF = (self.first / positive_C[:, None]).renorm(2, 0, longest)
        self.shares.copy_(present_C)
        self.first.copy_(present_C[:, None] * means_CF)
        if self.second.shape == self.first.shape:
            self.second.copy_(self.second.maximum(self.first * means_CF))
            return
        values, vectors = torch.linalg.eigh(self.covariances())
        below_0 = _half((vectors * values.clamp(max=0)[..., None, :]) @ vectors.mT)
        self.second -= below_0 if self.second.dim() == 1 else present_C[:, None] * below_0

    def means(self) -> Tensor:
        """μ_c = m_c / π_c, [C, F]."""
        return self.first / self.shares.clamp(min=1e-300)[:, None]

    def covariances(self) -> Tensor:
        """Σ: of each class [C, F] or [C, F, F], or within the classes [F, F]; a class without samples has zeros."""
        means_CF, shares_C1 = self.means(), self.shares.clamp(min=1e-300)[:, None]
        if self.second.shape == self.first.shape:
            return (self.second / shares_C1 - means_CF.square()).clamp(min=0)
        width = self.first.shape[1]
        rows, columns = torch.triu_indices(width, width)
        second = self.second.new_zeros(*self.second.shape[:-1], width, width)
        second[..., rows, columns] = second[..., columns, rows] = self.second
        if self.second.dim() == 1:
            return second - self.first.T @ means_CF
        return second / shares_C1[:, :, None] - means_CF[:, :, None] * means_CF[:, None, :]

    def problem(self) -> str:
        """Say why no samples can have these moments; "" if some can."""
        if bool((self.shares < 0).any()) or abs(float(self.shares.sum()) - 1) > TOLERANCE:
            return "shares of classes that are none"
        absent = self.shares == 0
        if self.first[absent].any() or (self.second.dim() > 1 and self.second[absent].any()):
            return "moments of a class without samples"
        if self.second.shape == self.first.shape:
            squares = self.second * self.shares[:, None]
            least, size = (squares - self.first.square()).amin(), squares.abs().amax()
        else:
            if not (covariances := self.covariances()).isfinite().all():
                return "moments too large to be added"
            size = covariances.diagonal(dim1=-2, dim2=-1).sum(-1).abs().amax() + self.second.abs().amax()
            least = torch.linalg.eigvalsh(covariances).amin()
        return "" if float(least) >= -TOLERANCE * float(size) else "second moments that are none: a variance below 0"

    def problem_with_noise(self, noise: float, longest: float) -> str:
        """`problem` for moments of samples of length ``longest``, where each number has ``noise`` times its size."""
        sizes = (self.shares, 1.0), (self.first, longest), (self.second, longest**2)
        above = any(float(value.abs().max()) > (1 + noise) * size for value, size in sizes)
        return "moments beyond what samples and noise can bring" if above else ""


class GaussianHead(nn.Module):
    """log π_c − ½ log |Σ_c| − ½ (x − μ_c)ᵀ Σ_c⁻¹ (x − μ_c): features [B, F] to logits [B, C]; linear for ``lda``."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    precision: Tensor
    longest: Tensor

    def __init__(self, num_classes: int, width: int, head: str) -> None:
        super().__init__()
        rows, self.kind = (num_classes, width), head
        precision = rows if head == "naive-bayes" else (*rows, width)
        shapes = {"weight": rows} if head == "lda" else {"mean": rows, "precision": precision}
        for name, shape in ({"bias": (num_classes,)} | shapes).items():
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("longest", torch.tensor(torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        x = x * (self.longest / x.norm(dim=1, keepdim=True)).clamp(max=1)  # as long as those of its moments, at most
        if self.kind == "lda":
            return x @ self.weight.T + self.bias
        away_BCF = x[:, None, :] - self.mean
        if self.kind == "naive-bayes":
            return self.bias - (away_BCF.square() * self.precision).sum(2) / 2
        return self.bias - torch.einsum("bcf,cfg,bcg->bc", away_BCF, self.precision, away_BCF) / 2

    def fit(self, moments: ClassMoments, counts_C: Tensor, priors_C: Tensor, shrinkage: float) -> None:
        """Become the classifier of these moments; each class's covariance has that within all as one more sample."""
        means_CF, covariances = moments.means(), moments.covariances()
        log_priors_C = priors_C.double().log().masked_fill(moments.shares == 0, -torch.inf)
        if self.kind == "lda":
            within = shrunk(covariances, float(counts_C.sum()), shrinkage)
            weight_CF = torch.linalg.solve(within, means_CF.T).T
            self.weight.copy_(weight_CF)
            self.bias.copy_(log_priors_C - (weight_CF * means_CF).sum(1) / 2)
            return
        diagonal = self.kind == "naive-bayes"
        shape = (-1, 1) if diagonal else (-1, 1, 1)
        within, n_C = (moments.shares.reshape(shape) * covariances).sum(0), counts_C.double().reshape(shape)
        smoothed = (n_C * covariances + within) / (n_C + 1)
        of_classes = torch.stack([shrunk(each, float(n), shrinkage) for each, n in zip(smoothed, n_C, strict=True)])
        log_volume_C = of_classes.log().sum(1) if diagonal else torch.logdet(of_classes)
        self.mean.copy_(means_CF)
        self.precision.copy_(1 / of_classes if diagonal else torch.linalg.inv(of_classes))
        self.bias.copy_(log_priors_C - log_volume_C / 2)


def shrunk(covariance: Tensor, samples: float, shrinkage: float) -> Tensor:
    """(1 − ρ) Σ + ρ (tr Σ / F) I of a covariance [F, F], or of variances [F]; ρ = ``shrinkage``.

    Below 0, ρ is the oracle approximating shrinkage of so many samples (Chen et al., "Shrinkage Algorithms for MMSE
    Covariance Estimation", IEEE TSP 2010, Eq. 23): ρ = min(1, ((1 − 2/F) tr Σ² + tr² Σ) / ((n + 1 − 2/F) (tr Σ² −
    tr² Σ / F))). A millionth of the mean variance is added, for features that never vary.
    """
    width, diagonal = len(covariance), covariance.dim() == 1
    trace = covariance.sum() if diagonal else covariance.trace()
    if shrinkage < 0:
        squares = covariance.square().sum()
        rest = (samples + 1 - 2 / width) * (squares - trace.square() / width)
        above = (1 - 2 / width) * squares + trace.square()
        shrinkage = min(1.0, float(above / rest)) if float(rest) > 0 else 1.0
    even = torch.full_like(covariance[0] if not diagonal else covariance, shrinkage * float(trace) / width)
    even = even + LEAST_VARIANCE + TOLERANCE * float(trace) / width
    return (1 - shrinkage) * covariance + (even if diagonal else torch.diag(even))


def _half(symmetric: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(*symmetric.shape[-2:])
    return symmetric[..., rows, columns]


def off_diagonal_parts(shape: torch.Size, width: int) -> Tensor:
    """√½ where numbers of second moments of this shape stand for two of a matrix, else 1."""
    return torch.ones(width) if shape[-1] == width else _half(torch.eye(width) + (1 - torch.eye(width)) / 2**0.5)
