"""How each data set is read, and the settings that do not fit it; what it is stands in its row.

The rows are `DATASETS` in `config/datasets.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import protofl_common.data.digits as drawn
import protofl_common.data.own as own
from protofl_common.config.datasets import DATASETS, PARTITIONS, DataSet, data_set_named
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import class_names, from_arrays
from protofl_common.data.images import data_dir_of, read_folder
from protofl_common.data.partitions import parse_clients_per_domain
from protofl_common.data.published import PUBLIC, locate_public, read_public
from protofl_common.data.raw import DataError, RawData
from protofl_common.data.several_labels import SeveralLabels
from protofl_common.data.table import definition_problems


@dataclass(frozen=True)
class Source:
    """How a data set is read."""

    read: Callable[[DataSettings], RawData]
    """The decoded data, at their own size or already at ``image-size``."""
    locate: Callable[[DataSettings], tuple[Path, ...]] = lambda settings: ()
    """Its files and folders; downloaded if need be."""
    domains: tuple[str, ...] = ()
    """The names of the domains where they are known without reading."""


def read_digits(settings: DataSettings) -> RawData:
    """Read scikit-learn's ``load_digits``: 1,797 images 8×8, without an official test part.

    Pixel values of 0…16 become 0…255.
    """
    from sklearn.datasets import load_digits

    scans = load_digits()
    pixels = np.rint(scans.images * (255 / 16)).astype(np.uint8)[:, None]  # [N, 1, 8, 8]
    return from_arrays({"inputs": pixels, "labels": scans.target}, "digits")


def read_table(loader: str, settings: DataSettings) -> RawData:
    """Read a table that scikit-learn brings with it; there is no official test part.

    ``loader`` is the name of its function in ``sklearn.datasets``.
    """
    from sklearn import datasets

    table = getattr(datasets, loader)()
    arrays = {"inputs": table.data, "labels": table.target, "classes": table.target_names}
    return from_arrays(arrays, loader)


def locate_folder(settings: DataSettings) -> tuple[Path, ...]:
    return (data_dir_of(settings),)


def _public(name: str) -> Source:
    return Source(partial(read_public, name), partial(locate_public, name))


SOURCES: dict[str, Source] = {
    "digits": Source(read_digits),
    "digit-domains": Source(drawn.read_domains, domains=tuple(drawn.DOMAINS)),
    "two-digits": Source(drawn.read_pairs, domains=tuple(drawn.DOMAINS)),
    "digit-mix": Source(drawn.read_mix, drawn.locate_mix, domains=drawn.REAL + drawn.LOOKS),
    "digit5": Source(drawn.read_digit5, drawn.locate_digit5),
    **{name: _public(name) for name in PUBLIC if name in DATASETS},
    "breast-cancer": Source(partial(read_table, "load_breast_cancer")),
    "wine": Source(partial(read_table, "load_wine")),
    "image-folder": Source(read_folder, locate_folder),
    "domain-folder": Source(read_folder, locate_folder),
    "manifest": Source(own.read_manifest, own.locate_manifest),
    "arrays": Source(own.read_arrays, own.locate_arrays),
    "text-csv": Source(own.read_text, own.locate_text),
}


def source_of(dataset: str) -> Source:
    """Return how the data set of the setting ``dataset`` is read.

    It may be a function of the user's, ``module:function``, or Hugging Face's ``hf:NAME``.
    """
    if dataset in SOURCES:
        return SOURCES[dataset]
    if dataset.startswith("hf:"):
        read = partial(own.read_hugging_face, dataset)
        return Source(read, partial(own.locate_hugging_face, dataset))
    return Source(partial(own.read_python, dataset), partial(own.locate_python, dataset))


def check_data_settings(settings: DataSettings) -> None:
    """Check whether the settings about data fit each other, without reading data.

    DataError has a line for each problem.
    """
    data_set = data_set_named(settings.dataset)
    problems = [
        *_about_parts(settings, data_set),
        *_about_clients_per_domain(settings),
        *_about_classes(settings, data_set),
        *_about_task(settings, data_set),
        *definition_problems(settings),
    ]
    if problems:
        raise DataError("\n".join(problems))


def check_data_are_here(settings: DataSettings) -> None:
    """Check that a data set's files are there, or that the run may download them later.

    DataError if they are missing. Nothing is downloaded here.
    """
    # the run will then download what is missing into `data_dir`; `locate` would do it now
    may_be_downloaded = settings.download and settings.data_dir
    if not may_be_downloaded:
        source_of(settings.dataset).locate(settings)


def _about_parts(settings: DataSettings, data_set: DataSet) -> Iterator[str]:
    """Yield a line for a ``test-from`` or ``partition`` that does not fit the data set.

    It may want a test part or domains that the data set lacks, or divide samples that are made of
    the same things among training and tests.
    """
    dataset = settings.dataset
    if settings.test_from.startswith("official") and not data_set.has_official:
        without = f"dataset {dataset!r} has no official test part"
        yield f"test-from = {settings.test_from!r}: {without}; use 'split' or 'balanced'"
    if data_set.shares_parts and not settings.test_from.startswith("official"):
        same = f"other samples of {dataset!r} are made of the same things"
        yield f"test-from = {settings.test_from!r}: {same}; use 'official-own'"
    if PARTITIONS[settings.partition].needs_domains and not data_set.has_domains:
        several = ", ".join(name for name, other in DATASETS.items() if other.has_domains)
        without = f"dataset {dataset!r} has no domains"
        cure = f"choose another partition, or a dataset among {several}"
        yield f"partition = {settings.partition!r}: {without}; {cure}"


def _about_clients_per_domain(settings: DataSettings) -> Iterator[str]:
    """Yield a line if ``clients-per-domain`` is no list, or has not a number for each domain.

    Domains that are not known before the data are read are counted later, in `partitions`.
    """
    text = settings.clients_per_domain
    domains = source_of(settings.dataset).domains
    try:
        counts = parse_clients_per_domain(text)
    except DataError as error:
        yield str(error)
        return
    if counts and domains and len(counts) != len(domains):
        has = f"dataset {settings.dataset!r} has {len(domains)} domains: {', '.join(domains)}"
        yield f"clients-per-domain = {text!r} has {len(counts)} numbers; {has}"


def _about_task(settings: DataSettings, data_set: DataSet) -> Iterator[str]:
    """Yield a line for each setting that does not fit one label a sample, or several (``task``)."""
    task = settings.task
    if task not in data_set.tasks:
        able = ", ".join(name for name, row in DATASETS.items() if task in row.tasks)
        cure = f"choose task = {data_set.tasks[0]!r}, or a dataset among {able}"
        yield f"task = {task!r}: dataset {settings.dataset!r} is not of this kind; {cure}"
    try:
        several = SeveralLabels.of(settings)
    except DataError as error:
        yield str(error)
        return
    if several is not None:
        if settings.positive_rate < 1:
            rate = f"positive-rate = {settings.positive_rate}"
            yield f"{rate}: hides labels of samples that have one each; set 1 (task = {task!r})"
        return
    only_of_several = {
        "label-map": settings.label_map,
        "annotated-labels": settings.annotated_labels,
    }
    for key, value in only_of_several.items():
        if value:
            yield f"{key} = {value!r}: only with several labels a sample (task = 'multi-label')"


def _about_classes(settings: DataSettings, data_set: DataSet) -> Iterator[str]:
    """Yield a line for each setting that does not fit the classes of the data set."""
    try:
        names = class_names(settings.classes)
    except DataError as error:
        yield str(error)
        return
    if names and not data_set.is_own:
        only = "only for data of your own"
        yield f"classes = {settings.classes!r}: {only}; {settings.dataset!r} has its own names"
        return
    num_classes = len(names) or data_set.num_classes  # 0: not known before the data are read
    classes_of_a_client = {
        "classes-per-client": settings.classes_per_client,
        "ways": settings.ways,
    }
    for key, wanted in classes_of_a_client.items():
        is_read = key in PARTITIONS[settings.partition].reads
        are_too_few = 0 < num_classes < wanted
        if is_read and are_too_few:
            yield f"{key} = {wanted}: there are only {num_classes} classes"
