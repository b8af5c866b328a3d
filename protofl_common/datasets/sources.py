"""Where data sets come from: one row per name that ``dataset`` may have says what it is and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets import digits_domains, digits_mix, files, folders, own, torchvision_sets
from protofl_common.datasets.arrays import from_arrays
from protofl_common.datasets.raw import RawData, without_domains


@dataclass(frozen=True)
class Source:
    """A data set that ``dataset`` can name.

    Attributes
    ----------
    read
        Settings -> the decoded data, at their own size or already at ``image-size``.
    locate
        Settings -> the files or folders that hold the data, downloaded if need be; None for the embedded data sets.
    num_classes
        Number of classes where it is known without reading; 0 where the data decide.
    domains
        Names of the domains where they are known without reading.
    has_domains, has_official
        Whether the data come, or may come, in domains, and with an official test part.
    own
        Whether the data are the user's, so that the setting ``classes`` applies.
    """

    read: Callable[[DataSettings], RawData]
    locate: Callable[[DataSettings], tuple[Path, ...]] | None = None
    num_classes: int = 0
    domains: tuple[str, ...] = ()
    has_domains: bool = False
    has_official: bool = False
    own: bool = False


def read_digits(settings: DataSettings) -> RawData:
    """scikit-learn's ``load_digits``: 1,797 images 8×8; their values 0…16 become 0…255. No official test part."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    return without_domains(
        images, digits.target, np.zeros(len(images), np.uint8), tuple(str(digit) for digit in range(10))
    )


def read_table(load: str, settings: DataSettings) -> RawData:
    """A bundled table of scikit-learn, by the name of its function; no official test part."""
    from sklearn import datasets

    table = getattr(datasets, load)()
    return from_arrays({"inputs": table.data, "labels": table.target, "classes": table.target_names}, load)


def source_of(dataset: str) -> Source:
    """The row of ``dataset``; of a Python name or of Hugging Face's, one made for it."""
    if dataset in SOURCES:
        return SOURCES[dataset]
    if dataset.startswith("hf:"):
        return _own(partial(own.read_hugging_face, dataset), partial(own.locate_hugging_face, dataset))
    return _own(partial(own.read_python, dataset), partial(own.locate_python, dataset))


def _own(read: Callable[[DataSettings], RawData], locate: Callable[[DataSettings], tuple[Path, ...]]) -> Source:
    """Data of the user's own, which decide what they have."""
    return Source(read, locate, has_domains=True, has_official=True, own=True)


def _torchvision(name: str, num_classes: int) -> Source:
    return Source(
        partial(torchvision_sets.read, name),
        partial(torchvision_sets.locate, name),
        num_classes=num_classes,
        has_official=True,
    )


SOURCES: dict[str, Source] = {
    "digits": Source(read_digits, num_classes=10),
    "digit-domains": Source(
        digits_domains.read, num_classes=10, domains=tuple(digits_domains.DOMAINS), has_domains=True
    ),
    "digit-mix": Source(
        digits_mix.read,
        digits_mix.locate,
        num_classes=10,
        domains=digits_mix.REAL + digits_mix.LOOKS,
        has_domains=True,
    ),
    "mnist": _torchvision("mnist", 10),
    "fashion-mnist": _torchvision("fashion-mnist", 10),
    "kmnist": _torchvision("kmnist", 10),
    "emnist": _torchvision("emnist", 47),
    "usps": _torchvision("usps", 10),
    "svhn": _torchvision("svhn", 10),
    "cifar10": _torchvision("cifar10", 10),
    "cifar100": _torchvision("cifar100", 100),
    "flowers102": _torchvision("flowers102", 102),
    "breast-cancer": Source(partial(read_table, "load_breast_cancer"), num_classes=2),
    "wine": Source(partial(read_table, "load_wine"), num_classes=3),
    "image-folder": Source(folders.read_image_folder, folders.locate, own=True),
    "domain-folder": Source(folders.read_domain_folder, folders.locate, has_domains=True, own=True),
    "manifest": _own(files.read_manifest, files.locate_manifest),
    "arrays": _own(files.read_arrays, files.locate_arrays),
    "text-csv": _own(files.read_text, files.locate_text),
}
