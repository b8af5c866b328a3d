"""Partitions that Flower Datasets' partitioners make: ``iid`` and ``dirichlet``."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.pool import Pool, Shares
from protofl_common.datasets.raw import DataError, Ints
from protofl_common.datasets.shares import Generator


def iid(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Random shares of equal size (Flower's ``IidPartitioner`` on the shuffled pool)."""
    from flwr_datasets.partitioner import IidPartitioner

    partitioner = _holding(IidPartitioner(clients), row=rng.permutation(len(pool.rows)))
    return _loaded(partitioner, clients)


def dirichlet(pool: Pool, settings: DataSettings, clients: int, rng: Generator) -> Shares:
    """Each class is divided over the clients in proportions from Dir(alpha) (Flower's ``DirichletPartitioner``).

    Drawn anew until every client has 10 samples, or a fifth of an equal share where that is less (but at least 2).

    Raises
    ------
    DataError
        When 220 draws do not give such shares.
    """
    from flwr_datasets.partitioner import DirichletPartitioner

    size = len(pool.rows)
    minimum = min(10, max(2, size // (5 * clients)))
    partitioner = DirichletPartitioner(
        num_partitions=clients,
        partition_by="label",
        alpha=settings.alpha,
        min_partition_size=minimum,
        self_balancing=False,
        seed=int(rng.integers(2**31)),
    )
    partitioner = _holding(partitioner, row=np.arange(size), label=pool.labels)
    for _ in range(20):
        with contextlib.suppress(ValueError):  # eleven draws failed; its generator goes on from there
            return _loaded(partitioner, clients)
    raise DataError(
        f"alpha = {settings.alpha}: no draw from Dir(alpha) gives each of {clients} clients {minimum} "
        f"of the {size} samples; use a larger alpha or fewer clients"
    )


def _holding(partitioner: Any, **columns: Ints) -> Any:
    """The partitioner with a Hugging Face data set that has only these columns."""
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict(columns)
    return partitioner


def _loaded(partitioner: Any, clients: int) -> Shares:
    """The column ``row`` of every partition; Flower's warnings about repeated draws are not for the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [partitioner.load_partition(client) for client in range(clients)]
    return [np.asarray(part.with_format("numpy")["row"][:], dtype=np.int64) for part in parts]
