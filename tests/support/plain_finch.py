"""The clusters of prototypes in the independent scripts, by the authors' FINCH."""

import numpy as np
from finch import FINCH


def coarsest_clusters(rows: np.ndarray) -> list[np.ndarray]:
    """Return the means of the clusters of FINCH's last partition, which has the fewest.

    A single row, which FINCH cannot take, is a cluster of its own.
    """
    cluster_of_row = np.zeros(1)
    if len(rows) > 1:
        partitions, *_ = FINCH(rows, verbose=False)
        cluster_of_row = partitions[:, -1]

    numbers = np.unique(cluster_of_row)
    return [rows[cluster_of_row == number].mean(0) for number in numbers]
