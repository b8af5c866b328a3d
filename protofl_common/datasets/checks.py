"""What can be said against the data settings without reading data."""

from __future__ import annotations

from collections.abc import Iterator

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.domain_partitions import parse_clients_per_domain
from protofl_common.datasets.folders import class_names
from protofl_common.datasets.partitions import DOMAIN_PARTITIONS
from protofl_common.datasets.raw import DataError
from protofl_common.datasets.sources import SOURCES, source_of


def check_data_settings(settings: DataSettings) -> None:
    """Find what is wrong with the settings before any client is contacted; reads no data.

    Raises
    ------
    DataError
        With one line per problem.
    """
    problems = [*_about_the_source(settings), *_about_domains(settings), *_about_classes(settings)]
    if problems:
        raise DataError("\n".join(problems))


def _about_the_source(settings: DataSettings) -> Iterator[str]:
    if settings.test_from.startswith("official") and not source_of(settings.dataset).has_official:
        without = f"dataset {settings.dataset!r} has no official test part"
        yield f"test-from = {settings.test_from!r}: {without}; use 'split' or 'balanced'"


def _about_domains(settings: DataSettings) -> Iterator[str]:
    source, text = source_of(settings.dataset), settings.clients_per_domain
    if settings.partition in DOMAIN_PARTITIONS and not source.has_domains:
        several = ", ".join(name for name, other in SOURCES.items() if other.has_domains)
        yield (
            f"partition = {settings.partition!r}: dataset {settings.dataset!r} has no domains; "
            f"choose another partition, or a dataset among {several}"
        )
    try:
        counts = parse_clients_per_domain(text)
    except DataError as error:
        yield str(error)
        return
    if counts and source.domains and len(counts) != len(source.domains):
        yield (
            f"clients-per-domain = {text!r} has {len(counts)} numbers; dataset {settings.dataset!r} has "
            f"{len(source.domains)} domains: {', '.join(source.domains)}"
        )


def _about_classes(settings: DataSettings) -> Iterator[str]:
    source = source_of(settings.dataset)
    try:
        named = class_names(settings.classes)
    except DataError as error:
        yield str(error)
        return
    if named and not source.own:
        yield f"classes = {settings.classes!r}: only for data of your own; {settings.dataset!r} has its own names"
        return
    known = len(named) or source.num_classes
    if settings.partition == "pathological" and known and settings.classes_per_client > known:
        yield f"classes-per-client = {settings.classes_per_client}: there are only {known} classes"
    if settings.partition == "n-way-k-shot" and known and settings.ways > known:
        yield f"ways = {settings.ways}: there are only {known} classes"
