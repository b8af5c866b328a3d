"""Class prototypes: computing them, as means or by clusters (FedPLVM, FPL), and predicting with them.

Probabilities, and the distance of a strange sample, are calibrated by a site's own samples outside training. Symbols:
N samples, P prototypes, C classes, D feature dimension, K clusters.

FINCH (Sarfraz et al., CVPR 2019; finch-clust) links every vector to its first neighbour, takes the connected components
as clusters, and repeats on their means: a hierarchy of partitions without a parameter.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

MAX_COMPARED = 4096  # prototypes of which `margins` takes all pairs: 17 million distances
TEMPERATURES = torch.logspace(-4, 4, 161)  # times the mean squared distance: the choices of T


@dataclass(frozen=True)
class Prototypes:
    """Prototypes with their classes; a class nobody holds is simply absent."""

    means: Tensor  # [P, D] float32
    labels: Tensor  # [P] int64, in [0, C)
    counts: Tensor | None = None  # [P] int64: samples behind each; None: not given

    def __len__(self) -> int:
        return int(self.labels.numel())

    def to(self, device: torch.device) -> "Prototypes":
        counts = None if self.counts is None else self.counts.to(device)
        return Prototypes(self.means.to(device), self.labels.to(device), counts)

    def only(self, rows: Tensor) -> "Prototypes":
        """Return the prototypes of these ``rows``: [P] bool, or positions in the order wanted."""
        return Prototypes(self.means[rows], self.labels[rows], None if self.counts is None else self.counts[rows])

    def thinned(self, most: float) -> "Prototypes":
        """Return these, or ⌊most⌋ of them at even distances in their order."""
        return self if len(self) <= most else self.only(torch.linspace(0, len(self) - 1, int(most)).round().long())

    @classmethod
    def joined(cls, sets: Iterable["Prototypes"]) -> "Prototypes":
        """All of at least one set, one after another; with counts where every set has them."""
        means, labels, counts = zip(*((each.means, each.labels, each.counts) for each in sets), strict=True)
        counted = [each for each in counts if each is not None]
        return cls(torch.cat(means), torch.cat(labels), torch.cat(counted) if len(counted) == len(counts) else None)

    def completed_by(self, others: "Prototypes") -> "Prototypes":
        """Return these, and behind them those of the ``others`` whose classes they lack."""
        return Prototypes.joined([self, others.only(~torch.isin(others.labels, self.labels))])

    def without_counts(self) -> "Prototypes":
        return Prototypes(self.means, self.labels)


def class_means(features_ND: Tensor, labels_N: Tensor, num_classes: int) -> Prototypes:
    """The mean feature of each class present (FedProto Eq. 1), in label order, on the CPU."""
    sums_CD = features_ND.new_zeros(num_classes, features_ND.shape[1], dtype=torch.float32)
    sums_CD.index_add_(0, labels_N, features_ND.float())
    counts_C = torch.bincount(labels_N, minlength=num_classes)
    labels_P = torch.nonzero(counts_C).flatten()
    means_PD = sums_CD[labels_P] / counts_C[labels_P].unsqueeze(1)
    return Prototypes(means_PD.cpu(), labels_P.cpu(), counts_C[labels_P].cpu())


def by_class(prototypes: Prototypes, num_classes: int) -> tuple[Tensor, Tensor]:
    """Prototypes, one per class, as a table: ``(means [C, D], mask [C] bool)``; rows of other classes are zero."""
    table_CD = prototypes.means.new_zeros(num_classes, prototypes.means.shape[1] if len(prototypes) else 0)
    mask_C = torch.zeros(num_classes, dtype=torch.bool, device=prototypes.means.device)
    table_CD[prototypes.labels] = prototypes.means
    mask_C[prototypes.labels] = True
    return table_CD, mask_C


def chosen(prototypes: Prototypes, among: Tensor) -> Prototypes:
    """The prototypes of the labels ``among`` [K] int64; all of them if none is of these labels."""
    of_these = torch.isin(prototypes.labels, among)
    return prototypes.only(of_these) if bool(of_these.any()) else prototypes


def distances(features_ND: Tensor, prototypes: Prototypes, similarity: str = "l2") -> Tensor:
    """Distances [N, P] of features from prototypes; the nearest one predicts (FedProto Eq. 2).

    ``similarity``: ``l2``, the Euclidean distance, or ``cosine`` (FedPCL), that of the vectors scaled to length 1,
    √(2 − 2 cos), which has the order of the angle.
    """
    means = prototypes.means
    if similarity == "cosine":
        features_ND, means = normalize(features_ND, dim=1), normalize(means, dim=1)
    return torch.cdist(features_ND, means, compute_mode="donot_use_mm_for_euclid_dist")


def class_scores(distances_NP: Tensor, labels_P: Tensor, num_classes: int) -> Tensor:
    """−d² from the nearest prototype of each class [N, C], −∞ for classes without one (Snell et al., NeurIPS 2017)."""
    scores_NC = distances_NP.new_full((len(distances_NP), num_classes), -math.inf)
    return scores_NC.scatter_reduce_(1, labels_P.expand(len(distances_NP), -1), -distances_NP.square(), "amax")


def fit_temperature(scores_NC: Tensor, labels_N: Tensor) -> float:
    """T for which softmax(scores / T) fits the labels best (Guo et al., ICML 2017); 1 without known classes."""
    known_N = scores_NC.gather(1, labels_N[:, None])[:, 0].isfinite()
    scores_NC, labels_N = scores_NC[known_N], labels_N[known_N]
    scale = float(-scores_NC[scores_NC.isfinite()].mean()) if len(scores_NC) else 0.0
    if scale <= 0:
        return 1.0
    losses = torch.stack([cross_entropy(scores_NC / (scale * t), labels_N) for t in TEMPERATURES])
    return scale * float(TEMPERATURES[losses.argmin()])


def unknown_above(distances_N: Tensor, share: float) -> float:
    """The distance above which a sample counts as unknown; ``distances_N`` [N] ascending, of such samples.

    Of new samples like these, at most ``share`` are above it on average (split conformal prediction: the k-th smallest
    with k = ⌈(N + 1)(1 − share)⌉). ∞, so that none is, when N is too small for that.
    """
    k = math.ceil((len(distances_N) + 1) * (1 - share))
    return float(distances_N[k - 1]) if k <= len(distances_N) else math.inf


def margins(prototypes: Prototypes, num_classes: int) -> Tensor:
    """The prototype margin [C] of each class: the least Euclidean distance of its prototypes to those of other classes.

    FedTGP, Figure 1; there a class has one prototype. NaN for a class without prototypes, and for all where there is
    but one class, or more than `MAX_COMPARED` prototypes.
    """
    nearest_C = torch.full((num_classes,), torch.inf, dtype=torch.float64)
    if 0 < len(prototypes) <= MAX_COMPARED:
        means, labels = prototypes.means.double(), prototypes.labels
        distances_PP = torch.cdist(means, means)
        distances_PP[labels.unsqueeze(1) == labels.unsqueeze(0)] = torch.inf
        nearest_C.scatter_reduce_(0, labels, distances_PP.amin(dim=1), "amin")
    return nearest_C.masked_fill(nearest_C.isinf(), torch.nan)


def finch_partitions(vectors_ND: np.ndarray) -> list[np.ndarray]:
    """FINCH's partitions by cosine distance, finest first: cluster numbers [N] each."""
    if len(vectors_ND) < 2:
        return [np.zeros(len(vectors_ND), dtype=np.int64)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says at import that its optional search libraries are missing
        from finch import FINCH
    labels_NP, _, _ = FINCH(vectors_ND, distance="cosine", ann_threshold=len(vectors_ND), verbose=False)
    return [np.asarray(column, dtype=np.int64) for column in labels_NP.T]


def cluster(vectors_ND: Tensor, method: str, clusters: int = 0) -> tuple[Tensor, Tensor]:
    """The means [K, D] of the clusters of ``vectors_ND`` [N, D], and how many vectors are in each, [K].

    ``method``: ``finch``, the partition with the fewest clusters; ``kmeans``, ``clusters`` many, or with 0 as many as
    FINCH finds (FedPLVM Table 9); ``average``, one.
    """
    if method == "average" or len(vectors_ND) == 1:
        return vectors_ND.mean(dim=0, keepdim=True), torch.tensor([len(vectors_ND)])
    vectors = vectors_ND.double().numpy()
    if method == "finch":
        return _means(vectors_ND, finch_partitions(vectors)[-1])
    if method != "kmeans":
        raise ValueError(f"clustering method is {method!r}, not one of finch, kmeans, average")
    from sklearn.cluster import KMeans

    wanted = clusters or int(finch_partitions(vectors)[-1].max()) + 1
    distinct = len(np.unique(vectors, axis=0))
    return _means(vectors_ND, KMeans(min(wanted, distinct), n_init=4, random_state=0).fit_predict(vectors))


def cluster_classes(
    vectors_ND: Tensor, labels_N: Tensor, method: str, clusters: int = 0, ratio: float = 0
) -> Prototypes:
    """Each class's vectors clustered alone (FedPLVM Eq. 3 and 4), by label; ``ratio``: into ⌈ratio · n⌉ (MPFT)."""
    found = []
    for label in labels_N.unique().tolist():
        rows_ND = vectors_ND[labels_N == label]
        share = math.ceil(ratio * len(rows_ND) * (1 - 1e-12))  # 0.07 of 100 is a little more than 7 in floating point
        of_class, sizes_K = cluster(rows_ND, method, share or clusters)
        found.append(Prototypes(of_class, torch.full_like(sizes_K, label), sizes_K))
    return Prototypes.joined(found)


def _means(vectors_ND: Tensor, cluster_N: np.ndarray) -> tuple[Tensor, Tensor]:
    cluster_of = torch.from_numpy(cluster_N).long()
    sums_KD = torch.zeros(int(cluster_of.max()) + 1, vectors_ND.shape[1], dtype=torch.float64)
    sums_KD.index_add_(0, cluster_of, vectors_ND.double())
    counts_K = torch.bincount(cluster_of)
    return (sums_KD / counts_K.unsqueeze(1)).to(vectors_ND.dtype), counts_K
