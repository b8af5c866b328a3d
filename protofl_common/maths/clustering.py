"""Clusters of feature vectors, and their means as prototypes (FedPLVM, FPL).

FINCH (Sarfraz et al., CVPR 2019; finch-clust) links every vector to its first neighbour, takes the connected components
as clusters, and repeats on their means: a hierarchy of partitions without a parameter.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from protofl_common.maths.prototypes import Prototypes


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
    if method == "kmeans":
        wanted = clusters or int(finch_partitions(vectors)[-1].max()) + 1
        distinct = len(np.unique(vectors, axis=0))
        from sklearn.cluster import KMeans

        found = KMeans(min(wanted, distinct), n_init=4, random_state=0).fit_predict(vectors)
        return _means(vectors_ND, found)
    raise ValueError(f"clustering method is {method!r}, not one of finch, kmeans, average")


def cluster_classes(
    vectors_ND: Tensor, labels_N: Tensor, method: str, clusters: int = 0, ratio: float = 0.0
) -> Prototypes:
    """Each class's vectors clustered on their own (FedPLVM Eq. 3 and 4): several prototypes per class, by label.

    ``ratio`` asks for ⌈ratio · n⌉ clusters of a class of n vectors (MPFT), instead of ``clusters`` many.
    """
    found = []
    for label in labels_N.unique().tolist():
        rows_ND = vectors_ND[labels_N == label]
        of_class, sizes_K = cluster(rows_ND, method, math.ceil(ratio * len(rows_ND)) or clusters)
        found.append(Prototypes(of_class, torch.full_like(sizes_K, label), sizes_K))
    return Prototypes.joined(found)


def _means(vectors_ND: Tensor, cluster_N: np.ndarray) -> tuple[Tensor, Tensor]:
    cluster_of = torch.from_numpy(cluster_N).long()
    sums_KD = torch.zeros(int(cluster_of.max()) + 1, vectors_ND.shape[1], dtype=torch.float64)
    sums_KD.index_add_(0, cluster_of, vectors_ND.double())
    counts_K = torch.bincount(cluster_of)
    return (sums_KD / counts_K.unsqueeze(1)).to(vectors_ND.dtype), counts_K
