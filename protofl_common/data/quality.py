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
from protofl_common.data.door import with_progress
from protofl_common.data.images import EXTENSIONS, image_files, open_image
from protofl_common.data.raw import are_images
from protofl_common.data.sources import source_of
from protofl_common.data.store import StoredData

MOST_STRETCHED = 2.0
"""An image is odd if it is more than so many times as wide or as high as the median, or if the
median is so many times as wide or as high as the image."""


class _Image(NamedTuple):
    """What a file says of its image; ``mode`` is Pillow's name of the channels, such as ``RGB``."""

    name: str
    mode: str
    size: tuple[int, int]
    has_one_colour: bool


def oddities(data: StoredData, settings: DataSettings) -> Iterator[str]:
    """Yield a line for each way in which some images are unlike the rest.

    Files of images are compared in colour, channels and size, and files that cannot be read are
    passed over. Images in an array have one size and the same channels: only those of a single
    colour are named. Other data yield nothing.
    """
    files = []
    for path in source_of(settings.dataset).locate(settings):
        if path.is_dir():
            files += image_files(path, Counter())
        elif path.suffix.lower() in EXTENSIONS:
            files.append(path)
    if files:
        with ThreadPoolExecutor(cpu_count()) as pool:
            images = pool.map(_inspected, files)
            readable = [
                image
                for image in with_progress(images, f"of {len(files):,} images looked at")
                if image
            ]
            yield from _unlike_the_rest(readable)
    elif are_images(data.inputs):
        widest_range_N = np.ptp(np.asarray(data.inputs), axis=(2, 3)).max(axis=1)  # of a channel
        rows = np.flatnonzero(widest_range_N == 0)
        if len(rows):
            yield f"{len(rows)} images of one colour: samples {first_of(map(str, rows))}"


def label_rates(data: StoredData) -> Iterator[str]:
    """Yield a line for each client, or domain, with its samples and its rate of each class."""
    kind = "client" if data.by_client else "domain"
    for number, name in enumerate(data.domain_names):
        labels = data.labels[data.domains == number]
        task = data.task
        counts = task.class_counts(task.tensor(labels))
        rates = []
        for class_name, count in zip(task.class_names, counts.tolist(), strict=True):
            if count:
                rates.append(f"{class_name} {100 * count / len(labels):.0f} %")
        yield f"{kind} {name}: {len(labels)} samples: {first_of(rates)}"


def _inspected(file: Path) -> _Image | None:
    """Decode an image file, and return what `oddities` compares; None if it cannot be decoded."""
    try:
        with open_image(file) as image:
            extrema = image.convert("RGB").getextrema()  # the lowest and highest value of a channel
            has_one_colour = all(low == high for low, high in extrema)
            return _Image(str(file), image.mode, image.size, has_one_colour)
    except Exception:  # decoders may raise anything; the reader of the data set names such files
        return None


def _unlike_the_rest(images: Sequence[_Image]) -> Iterator[str]:
    """Yield a line for images of one colour, one for rare channels, and one for odd sizes."""
    if not images:
        return
    of_one_colour = [image.name for image in images if image.has_one_colour]
    if of_one_colour:
        yield f"{len(of_one_colour)} images of one colour: {first_of(of_one_colour)}"

    usual_mode = Counter(image.mode for image in images).most_common(1)[0][0]
    others = [f"{image.name} ({image.mode})" for image in images if image.mode != usual_mode]
    if others:
        yield f"{len(others)} images of other channels than {usual_mode}: {first_of(others)}"

    width = median(image.size[0] for image in images)
    height = median(image.size[1] for image in images)
    unlike = []
    for image in images:
        ratios = (image.size[0] / width, image.size[1] / height)
        is_larger = max(ratios) > MOST_STRETCHED
        is_smaller = min(ratios) < 1 / MOST_STRETCHED
        if is_larger or is_smaller:
            unlike.append(f"{image.name} ({image.size[0]}×{image.size[1]})")
    if unlike:
        rest = f"unlike the rest, {width:.0f}×{height:.0f}"
        yield f"{len(unlike)} images of sizes {rest}: {first_of(unlike)}"
