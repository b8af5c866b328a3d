"""How a data set is divided among clients, told from the settings alone: nobody need send anything.

The division is deterministic, so whoever has the data set can see what each client's share holds. A client with data
of its own is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.clients import domain_of
from protofl_common.datasets.division import client_share
from protofl_common.datasets.raw import Ints
from protofl_common.datasets.store import data_if_cached


@dataclass(frozen=True)
class ShareCounts:
    """What one client's share holds: samples of each class, int64 [C], and its domain, "" for none or several."""

    train: Ints
    test: Ints
    domain: str


def counts_of_shares(
    settings: DataSettings, *, seed: int, chosen: Iterable[int], clients: int
) -> dict[int, ShareCounts]:
    """The shares of the ``chosen`` ones of ``clients`` clients; training samples count, labelled or not.

    {} where the cache of this machine does not have the data set, or nothing is divided (partition ``own``).

    Raises
    ------
    DataError
        When the data are missing, or cannot be divided like this.
    """
    data = data_if_cached(settings) if settings.partition != "own" else None
    if data is None:
        return {}
    labels, classes = np.asarray(data.labels), len(data.classes)
    found = {}
    for client in chosen:
        share = client_share(data, settings, seed=seed, client=client, clients=clients)
        train, test = (np.bincount(labels[rows], minlength=classes) for rows in (share.train, share.test))
        found[client] = ShareCounts(train, test, domain_of(data, share.train))
    return found
