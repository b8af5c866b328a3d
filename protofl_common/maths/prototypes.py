"""Class prototypes: computing them, as means or by clusters (FedPLVM, FPL), and predicting by them.

The distance of a strange sample is calibrated by a site's own samples outside training. Symbols: N
samples, P prototypes, C classes, D feature dimension, K clusters.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

MAX_COMPARED = 4096  # prototypes of which `margins` takes all pairs: 17 million distances


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
        """Return the prototypes of these ``rows``: a mask [P] bool, or positions in any order."""
        counts = None if self.counts is None else self.counts[rows]
        return Prototypes(self.means[rows], self.labels[rows], counts)

    def thinned(self, most: float) -> "Prototypes":
        """Return all of these if they are ``most`` or fewer, else ⌊most⌋ of them.

        Those are evenly spaced, from the first to the last.
        """
        if len(self) <= most:
            return self
        rows = torch.linspace(0, len(self) - 1, int(most)).round().long()
        return self.only(rows)

    @classmethod
    def joined(cls, sets: Iterable["Prototypes"]) -> "Prototypes":
        """Concatenate at least one set; the result has counts only if every set has them."""
        sets = list(sets)
        means = torch.cat([prototypes.means for prototypes in sets])
        labels = torch.cat([prototypes.labels for prototypes in sets])
        counts = [prototypes.counts for prototypes in sets if prototypes.counts is not None]
        all_have_counts = len(counts) == len(sets)
        return cls(means, labels, torch.cat(counts) if all_have_counts else None)

    def completed_by(self, others: "Prototypes") -> "Prototypes":
        """Return these, followed by the ``others`` of classes that these have no prototype of."""
        lacking = ~torch.isin(others.labels, self.labels)
        return Prototypes.joined([self, others.only(lacking)])

    def without_counts(self) -> "Prototypes":
        return Prototypes(self.means, self.labels)


def class_means(features_ND: Tensor, labels_N: Tensor, num_classes: int) -> Prototypes:
    """Return the mean feature of each class present (FedProto Eq. 1), on the CPU.

    In ascending order of the labels, with the number of samples behind each mean. They are float32,
    or float64 where the features are.
    """
    features_ND = features_ND.to(torch.promote_types(features_ND.dtype, torch.float32))
    sums_CD = features_ND.new_zeros(num_classes, features_ND.shape[1])
    sums_CD.index_add_(0, labels_N, features_ND)
    counts_C = torch.bincount(labels_N, minlength=num_classes)
    labels_P = torch.nonzero(counts_C).flatten()
    means_PD = sums_CD[labels_P] / counts_C[labels_P].unsqueeze(1)
    return Prototypes(means_PD.cpu(), labels_P.cpu(), counts_C[labels_P].cpu())


def by_class(prototypes: Prototypes, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return prototypes, at most one per class, as a table: ``(means [C, D], mask [C] bool)``.

    A class without a prototype has a row of zeros, and False in the mask. Without any prototype
    D is 0.
    """
    width = prototypes.means.shape[1] if len(prototypes) else 0
    table_CD = prototypes.means.new_zeros(num_classes, width)
    mask_C = torch.zeros(num_classes, dtype=torch.bool, device=prototypes.means.device)
    table_CD[prototypes.labels] = prototypes.means
    mask_C[prototypes.labels] = True
    return table_CD, mask_C


def chosen(prototypes: Prototypes, among: Tensor) -> Prototypes:
    """Return the prototypes with labels of ``among`` [K] int64, or all if none has one of them.

    So there is always one to predict by.
    """
    is_among_P = torch.isin(prototypes.labels, among)
    return prototypes.only(is_among_P) if bool(is_among_P.any()) else prototypes


def distances(features_ND: Tensor, prototypes: Prototypes, similarity: str = "l2") -> Tensor:
    """Return distances [N, P] of features from prototypes; the nearest predicts (FedProto Eq. 2).

    ``similarity``: ``l2``, the Euclidean distance, or ``cosine`` (FedPCL), that of the vectors
    scaled to length 1, √(2 − 2 cos), which has the order of the angle.
    """
    means_PD = prototypes.means
    if similarity == "cosine":
        features_ND = normalize(features_ND, dim=1)
        means_PD = normalize(means_PD, dim=1)
    return torch.cdist(features_ND, means_PD, compute_mode="donot_use_mm_for_euclid_dist")


def class_scores(distances_NP: Tensor, labels_P: Tensor, num_classes: int) -> Tensor:
    """Return −d² from the nearest prototype of each class [N, C] (Snell et al., NeurIPS 2017).

    −∞ for classes without a prototype.
    """
    scores_NP = -distances_NP.square()
    labels_NP = labels_P.expand(len(distances_NP), -1)
    scores_NC = distances_NP.new_full((len(distances_NP), num_classes), -math.inf)
    return scores_NC.scatter_reduce_(1, labels_NP, scores_NP, "amax")


def unknown_above(distances_N: Tensor, share: float) -> float:
    """Return the distance from the nearest prototype above which a sample counts as unknown.

    ``distances_N`` [N], ascending, are those of samples of known classes. Of new samples like
    these, at most the part ``share`` lies above the result on average. By split conformal
    prediction it is the k-th smallest distance, k = ⌈(N + 1)(1 − share)⌉. ∞, so that no sample is
    unknown, when N is too small for that.
    """
    k = math.ceil((len(distances_N) + 1) * (1 - share))
    return float(distances_N[k - 1]) if k <= len(distances_N) else math.inf


def margins(prototypes: Prototypes, num_classes: int) -> Tensor:
    """Return the prototype margin [C] of each class (FedTGP, Figure 1).

    It is the least Euclidean distance of the class's prototypes to those of other classes; in
    FedTGP a class has one prototype. NaN for a class without prototypes, and for all where only one
    class has any, or where there are more than `MAX_COMPARED`: too many pairs.
    """
    margins_C = torch.full((num_classes,), torch.inf, dtype=torch.float64)
    if 0 < len(prototypes) <= MAX_COMPARED:
        means_PD = prototypes.means.double()
        labels_P = prototypes.labels
        distances_PP = torch.cdist(means_PD, means_PD)
        same_class_PP = labels_P.unsqueeze(1) == labels_P.unsqueeze(0)
        distances_PP[same_class_PP] = torch.inf
        margins_C.scatter_reduce_(0, labels_P, distances_PP.amin(dim=1), "amin")
    return margins_C.masked_fill(margins_C.isinf(), torch.nan)


def cluster(vectors_ND: Tensor, method: str, clusters: int = 0) -> tuple[Tensor, Tensor]:
    """Cluster vectors [N, D]; return the clusters' means [K, D], and their numbers of vectors [K].

    ``method`` is ``finch``, FINCH's partition with the fewest clusters; ``kmeans``, with K =
    ``clusters``, or for 0 as many as FINCH finds (FedPLVM Table 9); or ``average``, one cluster.
    K-means begins from the same centres at every call.
    """
    if method == "average" or len(vectors_ND) == 1:
        return vectors_ND.mean(dim=0, keepdim=True), torch.tensor([len(vectors_ND)])
    from protofl_common.maths.finch import finch_partitions  # scikit-learn, half a second

    vectors = vectors_ND.double().numpy()
    if method == "finch":
        numbers = finch_partitions(vectors)[-1]
    elif method == "kmeans":
        from sklearn.cluster import KMeans

        wanted = clusters or int(finch_partitions(vectors)[-1].max()) + 1
        distinct = len(np.unique(vectors, axis=0))  # K-means finds no more clusters than these
        numbers = KMeans(min(wanted, distinct), n_init=4, random_state=0).fit_predict(vectors)
    else:
        raise ValueError(f"clustering method is {method!r}, not one of finch, kmeans, average")
    numbers_N = torch.from_numpy(numbers).long()
    _, counts_K = numbers_N.unique(return_counts=True)
    by_cluster = class_means(vectors_ND.double(), numbers_N, int(numbers_N.max()) + 1)
    return by_cluster.means.to(vectors_ND.dtype), counts_K


def cluster_classes(
    vectors_ND: Tensor, labels_N: Tensor, method: str, clusters: int = 0, ratio: float = 0
) -> Prototypes:
    """Cluster each class's vectors alone (FedPLVM Eq. 3 and 4); a prototype is a cluster's mean.

    ``method`` and ``clusters`` are those of `cluster`, for each class. With a ``ratio`` above 0 the
    n vectors of a class become ⌈ratio · n⌉ clusters instead (MPFT).
    """
    sets = []
    for label in labels_N.unique().tolist():
        of_class_ND = vectors_ND[labels_N == label]
        clusters_of_class = clusters
        if ratio:
            # a little less: 0.07 of 100 is more than 7 in floating point, and would become 8
            clusters_of_class = math.ceil(ratio * len(of_class_ND) * (1 - 1e-12))
        means_KD, sizes_K = cluster(of_class_ND, method, clusters_of_class)
        sets.append(Prototypes(means_KD, torch.full_like(sizes_K, label), sizes_K))
    return Prototypes.joined(sets)
