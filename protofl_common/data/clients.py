"""A client's own data, for the rest of the project."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.seeding import derive_seed
from protofl_common.config.sections import DataSettings
from protofl_common.data.division import Share, names_persons, number_in_division, shares_of
from protofl_common.data.partitions import shuffled_by_class
from protofl_common.data.raw import (
    MOST_BYTES_IN_MEMORY,
    DataError,
    Inputs,
    Ints,
    PerFeature,
    StoredRows,
    are_images,
    filled,
    statistics,
)
from protofl_common.data.sources import check_data_settings
from protofl_common.data.store import StoredData, open_data
from protofl_common.tasks import UNLABELLED, Task, kind_of, task_of

Scale = tuple[PerFeature, PerFeature, PerFeature]
"""Each feature's fill (what stands in the place of missing values), mean and deviation."""


@dataclass(frozen=True)
class ClientData:
    """The samples of one client.

    The arrays are read-only where they are views into the cache of the data set. Inputs are as
    `RawData.inputs`; no sample is in two parts, and for validation there may be none. Inputs above
    `MOST_BYTES_IN_MEMORY` stay on the disk (`StoredRows`). Labels are as `RawData.labels`; -1 for
    training samples without one (``positive-rate`` below 1), and for labels that are not known.
    """

    train_inputs: Inputs
    train_labels: Ints
    test_inputs: Inputs
    test_labels: Ints
    validation_inputs: Inputs
    validation_labels: Ints
    classes: tuple[str, ...]
    """Class names of the whole data set, of which the client may have a few only."""
    domain: str
    """The client's domain; "" when the data have none, or when its samples are of several."""
    mean: PerFeature
    std: PerFeature
    """Per channel of images in [0, 1], or per feature of numbers, as ``mean``; () for tokens."""
    fill: PerFeature
    """What stands in the place of missing values, per feature; () without ``impute``."""
    columns: tuple[str, ...]
    """Of a table or texts, see `RawData`."""
    found: int
    """Samples that the share was taken from: of the data set, or of the domain that it names."""
    notes: tuple[str, ...] = ()
    """Lines for their owner, see `RawData`."""
    persons: Share | None = None
    """The person of each sample, as numbers, by part; None where the data do not say it."""
    has_uneven_classes: bool = False
    """The data set that clients divide has a class of more than twice another's samples."""

    @property
    def task(self) -> Task:
        return task_of(self.classes, kind_of(self.train_labels))


def open_client_data(
    settings: DataSettings,
    *,
    seed: int,
    partition: int,
    num_partitions: int,
    domain: str = "",
    shared_scale: bool = False,
    key: bytes = b"",
) -> ClientData:
    """Open the data of client number ``partition`` of ``num_partitions``.

    They follow from the arguments alone. With a ``domain``, from the client's own configuration,
    it gets that domain as if it were its only client; the partition must be ``own``,
    ``feature-shift`` or ``feature-label-shift``. ``key`` is what a site with data of its own
    divides them by (``test-from = "keyed"``). With ``shared_scale`` all clients standardise alike.
    The first call on a machine decodes the data set into the cache; later ones take milliseconds.
    """
    check_data_settings(settings)
    data = open_data(settings)
    client, clients = number_in_division(settings, partition, num_partitions, domain)
    share = shares_of(data, settings, seed, clients, domain, key)[client]
    if settings.standardise == "auto" and are_images(data.inputs):
        fill: PerFeature = ()
        mean = data.mean
        std = data.std
    elif shared_scale or settings.standardise == "pooled":
        fill, mean, std = _pooled_scale(data, settings, seed, clients, domain, key)
    else:
        fill, mean, std = _scale_of(data, settings, share.train)

    hiding_seed = derive_seed(seed, "labelled", client, domain)
    train_labels = annotated(_rows(data.labels, share.train), settings, client, clients)
    validation_labels = annotated(_rows(data.labels, share.validation), settings, client, clients)
    rows_of_domain = share.train
    if settings.partition == "own":
        # all rows: if only one patient's samples are for training, the patient is not named
        rows_of_domain = np.concatenate(share)
    persons = None
    if names_persons(data, settings, domain):
        persons = Share(*(_rows(data.domains, part) for part in share))
    found = len(data.labels)
    if domain:
        found = int((data.domains == data.domain_names.index(domain)).sum())
    return ClientData(
        train_inputs=_rows(data.inputs, share.train, fill),
        train_labels=hide_labels(train_labels, settings.positive_rate, hiding_seed),
        test_inputs=_rows(data.inputs, share.test, fill),
        test_labels=_rows(data.labels, share.test),
        validation_inputs=_rows(data.inputs, share.validation, fill),
        validation_labels=validation_labels,
        classes=data.classes,
        domain=domain_of(data, rows_of_domain),
        mean=mean,
        std=std,
        fill=fill,
        columns=data.columns,
        found=found,
        notes=data.notes,
        persons=persons,
        has_uneven_classes=settings.partition != "own" and data.has_uneven_classes,
    )


def hide_labels(labels: Ints, rate: float, seed: int) -> Ints:
    """Return ``labels`` with all but a random part ``rate`` of each class as `UNLABELLED`.

    At least one label of each class stays. With one seed, what a larger rate hides, a smaller one
    hides too.
    """
    if rate >= 1:
        return labels
    hidden = np.full_like(labels, UNLABELLED)
    for positions in shuffled_by_class(labels, np.random.default_rng(seed)):
        labelled = positions[: max(1, round(rate * len(positions)))]
        hidden[labelled] = labels[labelled]
    return hidden


def annotated(labels: Ints, settings: DataSettings, client: int, clients: int) -> Ints:
    """Return ``labels`` [N, L] with those that a simulated client has not annotated `UNLABELLED`.

    It has annotated ``annotated-labels`` of the L labels, or all if that is 0. DataError if there
    are not so many, or the clients together would leave some to nobody.
    """
    number = settings.annotated_labels
    if not number:
        return labels
    total = labels.shape[1]
    which = f"annotated-labels = {number}"
    if number > total:
        raise DataError(f"{which}: there are only {total} labels")
    if number * clients < total:
        raise DataError(
            f"{which}: {clients} clients would leave some of the {total} labels to nobody; "
            "choose more"
        )
    # neighbours on a ring of all labels; the clients begin at even distances, so that all labels
    # are annotated about as often
    begin = client * total // clients
    columns = (begin + np.arange(number)) % total
    known = np.full_like(labels, UNLABELLED)
    known[:, columns] = labels[:, columns]
    return known


@lru_cache(maxsize=8)
def _pooled_scale(
    data: StoredData, settings: DataSettings, seed: int, clients: int, domain: str, key: bytes
) -> Scale:
    """Return the scale of all clients' training samples together, computed once per process."""
    rows = [share.train for share in shares_of(data, settings, seed, clients, domain, key)]
    return _scale_of(data, settings, np.unique(np.concatenate(rows)))


def _scale_of(data: StoredData, settings: DataSettings, rows: Ints) -> Scale:
    """Return each feature's fill, mean and deviation in these ``rows``.

    The fill is the mean or the median of a feature's values without gaps, as ``impute`` says; ()
    with "none", and for inputs that are no numbers. Mean and deviation are those after filling.
    """
    inputs = _rows(data.inputs, rows)
    fill: PerFeature = ()
    if settings.impute != "none" and np.issubdtype(inputs.dtype, np.floating):
        average = np.nanmedian if settings.impute == "median" else np.nanmean
        all_but_features = (0, *range(2, inputs.ndim))
        # NumPy warns of a feature without any value: its average is NaN, and its fill 0
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            averages = average(np.asarray(inputs, np.float64), axis=all_but_features)
        fill = tuple(np.nan_to_num(averages).tolist())
    mean, std = statistics(_rows(data.inputs, rows, fill))
    return fill, mean, std


def _rows(array: NDArray[Any], rows: Ints, fill: Sequence[float] = ()) -> NDArray[Any]:
    """Return ``rows``, in rising order, of an array in the cache, with gaps filled by ``fill``.

    Rows that follow one another are a view, whose memory all clients of the machine share; others
    are a copy. Inputs above `MOST_BYTES_IN_MEMORY` are read from the disk when they are indexed.
    """
    bytes_as_float32 = 4 * len(rows) * math.prod(array.shape[1:])
    has_several_numbers = array.ndim > 1  # in a row; labels [N] are small enough
    if has_several_numbers and bytes_as_float32 > MOST_BYTES_IN_MEMORY:
        return cast(NDArray[Any], StoredRows(array, rows, fill))

    in_memory = np.asarray(array)  # a plain array on the same memory
    follow_one_another = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1
    if follow_one_another:
        return filled(in_memory[rows[0] : rows[-1] + 1], fill)
    return filled(in_memory[rows], fill)


def domain_of(data: StoredData, rows: Ints) -> str:
    """Return the domain of these ``rows``; "" if the data have none, or the rows several."""
    present = np.unique(np.asarray(data.domains)[rows])
    if not data.domain_names or len(present) != 1:
        return ""
    return data.domain_names[int(present[0])]
