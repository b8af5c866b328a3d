"""The data sets: a row per name that ``dataset`` may have, and the settings that do not fit it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import protofl_common.data.digits as drawn
import protofl_common.data.own as own
from protofl_common.config.datasets import is_own
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import class_names, from_arrays
from protofl_common.data.images import data_dir_of, read_folder
from protofl_common.data.partitions import DOMAIN_PARTITIONS, parse_clients_per_domain
from protofl_common.data.published import OF_TORCHVISION, OTHERS, locate_public, read_public
from protofl_common.data.raw import DataError, RawData
from protofl_common.data.table import definition_problems


@dataclass(frozen=True)
class Source:
    """A data set that ``dataset`` can name."""

    read: Callable[[DataSettings], RawData]
    """The decoded data, at their own size or already at ``image-size``."""
    locate: Callable[[DataSettings], tuple[Path, ...]] = lambda settings: ()
    """Its files and folders; downloaded if need be."""
    num_classes: int = 0
    """Their number where it is known without reading; 0 where the data decide."""
    domains: tuple[str, ...] = ()
    """The names of the domains where they are known without reading."""
    has_domains: bool = False
    """The data come, or may come, in domains."""
    has_official: bool = False
    """The data come, or may come, with an official test part."""


def read_digits(settings: DataSettings) -> RawData:
    """scikit-learn's ``load_digits``: 1,797 images 8×8, without an official test part.

    Their values 0…16 become 0…255.
    """
    from sklearn.datasets import load_digits

    scans = load_digits()
    pixels = np.rint(scans.images * (255 / 16)).astype(np.uint8)[:, None]
    return from_arrays({"inputs": pixels, "labels": scans.target}, "digits")


def read_table(load: str, settings: DataSettings) -> RawData:
    """A bundled table of scikit-learn, by the name of its function; no official test part."""
    from sklearn import datasets

    table = getattr(datasets, load)()
    arrays = {"inputs": table.data, "labels": table.target, "classes": table.target_names}
    return from_arrays(arrays, load)


def locate_folder(settings: DataSettings) -> tuple[Path, ...]:
    return (data_dir_of(settings),)


def _of_torchvision(name: str) -> Source:
    return Source(
        partial(read_public, name),
        partial(locate_public, name),
        num_classes=OF_TORCHVISION[name].classes,
        has_official=True,
    )


def _open_ended(
    read: Callable[[DataSettings], RawData],
    locate: Callable[[DataSettings], tuple[Path, ...]],
) -> Source:
    """A data set that itself decides whether it has domains and an official test part."""
    return Source(read, locate, has_domains=True, has_official=True)


def _published(name: str) -> Source:
    return _open_ended(partial(read_public, name), partial(locate_public, name))


SOURCES: dict[str, Source] = {
    "digits": Source(read_digits, num_classes=10),
    "digit-domains": Source(
        drawn.read_domains,
        num_classes=10,
        domains=tuple(drawn.DOMAINS),
        has_domains=True,
    ),
    "digit-mix": Source(
        drawn.read_mix,
        drawn.locate_mix,
        num_classes=10,
        domains=drawn.REAL + drawn.LOOKS,
        has_domains=True,
    ),
    **{name: _of_torchvision(name) for name in OF_TORCHVISION},
    "digit5": Source(
        drawn.read_digit5,
        drawn.locate_digit5,
        num_classes=10,
        has_domains=True,
        has_official=True,
    ),
    **{name: _published(name) for name in OTHERS},
    "breast-cancer": Source(partial(read_table, "load_breast_cancer"), num_classes=2),
    "wine": Source(partial(read_table, "load_wine"), num_classes=3),
    "image-folder": Source(read_folder, locate_folder),
    "domain-folder": Source(read_folder, locate_folder, has_domains=True),
    "manifest": _open_ended(own.read_manifest, own.locate_manifest),
    "arrays": _open_ended(own.read_arrays, own.locate_arrays),
    "text-csv": _open_ended(own.read_text, own.locate_text),
}


def source_of(dataset: str) -> Source:
    """The row of ``dataset``, made for it when it is a Python name or one of Hugging Face's."""
    if dataset in SOURCES:
        return SOURCES[dataset]
    if dataset.startswith("hf:"):
        read = partial(own.read_hugging_face, dataset)
        return _open_ended(read, partial(own.locate_hugging_face, dataset))
    read = partial(own.read_python, dataset)
    return _open_ended(read, partial(own.locate_python, dataset))


def check_data_settings(settings: DataSettings) -> None:
    """Check the settings before any client is contacted, without reading data.

    DataError has a line per problem.
    """
    source = source_of(settings.dataset)
    problems = [
        *_about_parts(settings, source),
        *_about_classes(settings, source),
        *definition_problems(settings),
    ]
    if problems:
        raise DataError("\n".join(problems))


def _about_parts(settings: DataSettings, source: Source) -> Iterator[str]:
    """Yield what does not fit the test part and the domains of the data set."""
    dataset = settings.dataset
    text = settings.clients_per_domain
    if settings.test_from.startswith("official") and not source.has_official:
        without = f"dataset {dataset!r} has no official test part"
        yield f"test-from = {settings.test_from!r}: {without}; use 'split' or 'balanced'"
    if settings.partition in DOMAIN_PARTITIONS and not source.has_domains:
        several = ", ".join(name for name, other in SOURCES.items() if other.has_domains)
        without = f"dataset {dataset!r} has no domains"
        cure = f"choose another partition, or a dataset among {several}"
        yield f"partition = {settings.partition!r}: {without}; {cure}"
    try:
        counts = parse_clients_per_domain(text)
    except DataError as error:
        yield str(error)
        return
    if counts and source.domains and len(counts) != len(source.domains):
        has = f"dataset {dataset!r} has {len(source.domains)} domains: {', '.join(source.domains)}"
        yield f"clients-per-domain = {text!r} has {len(counts)} numbers; {has}"


def _about_classes(settings: DataSettings, source: Source) -> Iterator[str]:
    """Yield what does not fit the classes of the data set."""
    try:
        names = class_names(settings.classes)
    except DataError as error:
        yield str(error)
        return
    if names and not is_own(settings.dataset):
        only = "only for data of your own"
        yield f"classes = {settings.classes!r}: {only}; {settings.dataset!r} has its own names"
        return
    number = len(names) or source.num_classes
    if settings.partition == "pathological" and 0 < number < settings.classes_per_client:
        wanted = settings.classes_per_client
        yield f"classes-per-client = {wanted}: there are only {number} classes"
    if settings.partition == "n-way-k-shot" and 0 < number < settings.ways:
        yield f"ways = {settings.ways}: there are only {number} classes"
