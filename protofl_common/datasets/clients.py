"""A client's own data: what the rest of the project asks this package for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.checks import check_data_settings
from protofl_common.datasets.division import client_share, placed
from protofl_common.datasets.inputs import StoredRows, too_large
from protofl_common.datasets.labelling import hide_labels
from protofl_common.datasets.raw import Inputs, Ints
from protofl_common.datasets.store import StoredData, open_data
from protofl_common.seeding import derive_seed


@dataclass(frozen=True)
class ClientData:
    """The samples of one client; the arrays are read-only where they are views into the cache of the data set.

    Attributes
    ----------
    train_inputs, test_inputs, validation_inputs
        As `RawData.inputs`: images, numbers or tokens [n, …]; no sample is in two. For validation there may be none.
        What would take much of the memory stays on the disk (`StoredRows`).
    train_labels, test_labels, validation_labels
        int64 [n], indices into ``classes``; with ``positive-rate`` below 1, -1 for the unlabelled training samples.
    classes
        Class names of the whole data set, of which the client may hold a few only.
    domain
        The client's domain; "" when the data have none, or when the client's samples are of several.
    mean, std
        Per channel, of the images scaled to [0, 1], over the whole data set (a constant channel has std 1). Of numbers
        per channel or feature, without an official test part; () for tokens.
    found
        Number of samples that the client's share was taken from: those of the data set, or of the domain it names.
    """

    train_inputs: Inputs
    train_labels: Ints
    test_inputs: Inputs
    test_labels: Ints
    validation_inputs: Inputs
    validation_labels: Ints
    classes: tuple[str, ...]
    domain: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    found: int


def open_client_data(
    settings: DataSettings, *, seed: int, partition: int, num_partitions: int, domain: str = ""
) -> ClientData:
    """The data of client ``partition`` of ``num_partitions``; the same arguments give the same samples.

    ``domain`` is what the client's own configuration says it holds. With the partitions ``own``, ``feature-shift``
    and ``feature-label-shift`` the client then gets that domain as if it were its only client, whatever its
    partition id. The first call on a machine decodes the data set into the cache; later ones take milliseconds.

    Raises
    ------
    DataError
        When the data cannot be read or divided as asked.
    """
    check_data_settings(settings)
    data = open_data(settings)
    client, clients = placed(settings, partition, num_partitions, domain)
    share = client_share(data, settings, seed=seed, client=client, clients=clients, domain=domain)
    hiding = np.random.default_rng(derive_seed(seed, "labelled", client, domain))
    return ClientData(
        train_inputs=_rows(data.inputs, share.train),
        train_labels=hide_labels(_rows(data.labels, share.train), settings.positive_rate, hiding),
        test_inputs=_rows(data.inputs, share.test),
        test_labels=_rows(data.labels, share.test),
        validation_inputs=_rows(data.inputs, share.validation),
        validation_labels=_rows(data.labels, share.validation),
        classes=data.classes,
        domain=domain_of(data, share.train),
        mean=data.mean,
        std=data.std,
        found=_found(data, domain),
    )


def _rows(array: NDArray[Any], rows: Ints) -> NDArray[Any]:
    """These rows: copied, or, where they follow one another, as a view that all clients of the machine share."""
    if array.ndim > 1 and too_large((len(rows), *array.shape[1:])):
        return cast(NDArray[Any], StoredRows(array, rows))
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return np.asarray(array)[rows[0] : rows[-1] + 1]
    copied: NDArray[Any] = np.asarray(array)[rows]
    return copied


def _found(data: StoredData, domain: str) -> int:
    if not domain:
        return len(data.labels)
    return int(np.count_nonzero(np.asarray(data.domains) == data.domain_names.index(domain)))


def domain_of(data: StoredData, rows: Ints) -> str:
    """The domain of these rows; "" where the data have none, or the rows are of several."""
    present = np.unique(np.asarray(data.domains)[rows])
    return data.domain_names[present[0]] if data.domain_names and len(present) == 1 else ""
