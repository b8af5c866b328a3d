"""How the samples of a data set are divided among clients: one function for each legal value of ``partition``.

Every function takes the pool of samples to divide, the settings, the number of clients and a random generator, and
returns for each client the positions (int64) of its share in the pool. Shares are disjoint, except where
`n_way_k_shot` says otherwise. The same generator state gives the same shares.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.class_partitions import label_shift, n_way_k_shot, pathological
from protofl_common.datasets.dirichlet import balanced_dirichlet, dirichlet
from protofl_common.datasets.domain_partitions import feature_label_shift, feature_shift
from protofl_common.datasets.pool import Pool, Shares
from protofl_common.datasets.raw import DataError
from protofl_common.datasets.shares import Generator


def iid(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Random shares of (nearly) equal size."""
    return np.array_split(rng.permutation(len(pool.rows)), clients)


def own(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Everything for the one client there is."""
    return [np.arange(len(pool.rows))]


def natural(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """The clients that the data name: client i has the samples of the i-th name.

    Raises
    ------
    DataError
        When there are more or fewer names than clients.
    """
    names = pool.domain_names
    if len(names) != clients:
        raise DataError(
            f"partition = 'natural': the data name {len(names)} clients, not {clients}; in simulation run that many "
            "(protofl run --clients), or choose feature-shift, which divides a name among several or leaves some out"
        )
    return [np.flatnonzero(pool.domains == client) for client in range(clients)]


DIVIDE: dict[str, Callable[[Pool, DataSettings, int, Generator], Shares]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "balanced-dirichlet": balanced_dirichlet,
    "pathological": pathological,
    "n-way-k-shot": n_way_k_shot,
    "feature-shift": feature_shift,
    "label-shift": label_shift,
    "feature-label-shift": feature_label_shift,
    "natural": natural,
    "own": own,
}
DOMAIN_PARTITIONS = ("feature-shift", "feature-label-shift", "natural")
"""The partitions that need data with domains."""
