"""FINCH (Sarfraz et al., CVPR 2019): a hierarchy of partitions without a parameter.

It links every vector to its first neighbour by the cosine, takes the connected components as
clusters, and repeats on their means. The authors' package (finch-clust) finds the same partitions,
but holds several numbers for each pair of vectors in memory.

Symbols: N vectors, D their dimension, K clusters, B vectors of a block.
"""

import numpy as np
from scipy import sparse
from sklearn.preprocessing import normalize

MAX_PAIRS = 2**26  # of which the distances are in memory at once: all pairs of 8192 vectors


def finch_partitions(vectors_ND: np.ndarray) -> list[np.ndarray]:
    """Return FINCH's partitions by cosine distance, the one with the most clusters first.

    Each is an array [N] of the vectors' cluster numbers, from 0.
    """
    vectors_ND = np.asarray(vectors_ND, dtype=np.float32)
    partition_N = _linked(_first_neighbours(vectors_ND))
    partitions = [partition_N]
    clusters = int(partition_N.max()) + 1
    while True:
        means_KD = _means(vectors_ND, partition_N)
        merged_K = _linked(_first_neighbours(means_KD))
        clusters_before = clusters
        clusters = int(merged_K.max()) + 1
        if clusters == 1 or clusters_before - clusters <= 1:
            return partitions
        partition_N = merged_K[partition_N]
        partitions.append(partition_N)


def _first_neighbours(vectors_ND: np.ndarray) -> np.ndarray:
    """Return the position [N] of each vector's nearest other vector by the cosine.

    All pairs are compared, block by block. Of neighbours that are as near the first one counts;
    distances are rounded as finch-clust rounds them, so that the same ones are.
    """
    unit_ND = normalize(vectors_ND)
    number = len(unit_ND)
    block = max(1, MAX_PAIRS // number)
    neighbours_N = np.empty(number, dtype=np.int64)
    for start in range(0, number, block):
        rows_B = np.arange(start, min(start + block, number))
        distances_BN = unit_ND[start : start + block] @ unit_ND.T
        np.subtract(1, distances_BN, out=distances_BN)
        np.clip(distances_BN, 0, 2, out=distances_BN)
        distances_BN = distances_BN.astype(np.float32, copy=False)
        distances_BN[rows_B - start, rows_B] = np.inf  # a vector is not its own neighbour
        neighbours_N[rows_B] = distances_BN.argmin(axis=1)
    return neighbours_N


def _linked(neighbours_N: np.ndarray) -> np.ndarray:
    """Return the number [N] of the connected component of each vector, linked to its neighbour."""
    number = len(neighbours_N)
    links = (np.ones(number), (np.arange(number), neighbours_N))
    graph_NN = sparse.csr_array(links, shape=(number, number))
    _, components_N = sparse.csgraph.connected_components(graph_NN, connection="weak")
    return np.asarray(components_N, dtype=np.int64)


def _means(vectors_ND: np.ndarray, partition_N: np.ndarray) -> np.ndarray:
    """Return the mean [K, D] of each cluster."""
    counts_K = np.bincount(partition_N)
    sums_KD = np.zeros((len(counts_K), vectors_ND.shape[1]), np.float32)
    np.add.at(sums_KD, partition_N, vectors_ND)
    return sums_KD / counts_K[:, None]
