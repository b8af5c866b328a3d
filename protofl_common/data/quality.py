"""What is odd about data that can be read: lines for their owner, who looks at them once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from protofl_common.basics.text import first_of
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import counted
from protofl_common.data.images import EXTENSIONS, image_files, open_image
from protofl_common.data.raw import are_images
from protofl_common.data.sources import source_of
from protofl_common.data.store import StoredData

MOST_STRETCHED = 2.0  # times the usual width or height, or part of it


class _Image(NamedTuple):
    """What a file says of its image; where it cannot be read, ``mode`` is "" and no size is known.

    ``mode`` is Pillow's name of the channels, such as ``RGB``.
    """

    name: str
    mode: str
    size: tuple[int, int]
    has_one_colour: bool


def oddities(data: StoredData, settings: DataSettings) -> Iterator[str]:
    """Yield a line for each way in which some images are unlike the rest.

    Files of images are compared in colour, channels and size. Of images in an array, which all have
    one size, those of a single colour are named. Other data yield nothing.
    """
    files = []
    for path in source_of(settings.dataset).locate(settings):
        if path.is_dir():
            files += image_files(path)
        elif path.suffix.lower() in EXTENSIONS:
            files.append(path)
    if files:
        with ThreadPoolExecutor(cpu_count()) as pool:
            looked_at = counted(pool.map(_looked_at, files), f"of {len(files):,} images looked at")
            readable = [image for image in looked_at if image.mode]
            yield from _unlike_the_rest(readable)
    elif are_images(data.inputs):
        spread = np.ptp(np.asarray(data.inputs), axis=(2, 3)).max(axis=1)
        rows = np.flatnonzero(spread == 0)
        if len(rows):
            yield f"{len(rows)} images of one colour: samples {first_of(map(str, rows))}"


def label_rates(data: StoredData) -> Iterator[str]:
    """Yield how often each client, or domain, has each class."""
    kind = "client" if data.by_client else "domain"
    for number, name in enumerate(data.domain_names):
        labels = data.labels[data.domains == number]
        task = data.task
        counts = task.class_counts(task.tensor(labels))
        rates = []
        for of_class, count in zip(task.class_names, counts.tolist(), strict=True):
            if count:
                rates.append(f"{of_class} {100 * count / len(labels):.0f} %")
        yield f"{kind} {name}: {len(labels)} samples: {first_of(rates)}"


def _looked_at(file: Path) -> _Image:
    try:
        with open_image(file) as image:
            extrema = image.convert("RGB").getextrema()
            has_one_colour = all(low == high for low, high in extrema)
            return _Image(str(file), image.mode, image.size, has_one_colour)
    except Exception:  # what decoders raise of a broken file may be anything; its reading names it
        return _Image(str(file), "", (0, 0), False)


def _unlike_the_rest(images: Sequence[_Image]) -> Iterator[str]:
    if not images:
        return
    plain = [image.name for image in images if image.has_one_colour]
    if plain:
        yield f"{len(plain)} images of one colour: {first_of(plain)}"

    usual_mode = Counter(image.mode for image in images).most_common(1)[0][0]
    others = [f"{image.name} ({image.mode})" for image in images if image.mode != usual_mode]
    if others:
        yield f"{len(others)} images of other channels than {usual_mode}: {first_of(others)}"

    width = median(image.size[0] for image in images)
    height = median(image.size[1] for image in images)
    unlike = []
    for image in images:
        ratios = (image.size[0] / width, image.size[1] / height)
        if max(ratios) > MOST_STRETCHED or min(ratios) < 1 / MOST_STRETCHED:
            unlike.append(f"{image.name} ({image.size[0]}×{image.size[1]})")
    if unlike:
        rest = f"unlike the rest, {width:.0f}×{height:.0f}"
        yield f"{len(unlike)} images of sizes {rest}: {first_of(unlike)}"
