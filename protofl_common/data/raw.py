"""The decoded data set that every source delivers, its inputs, and how models see them.

Inputs [N, …] are images uint8 [N, channels, H, W], numbers (floating point) or tokens (integers).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import LONGEST_IN_LOG, printable
from protofl_common.tasks import Task, kind_of, task_of

if TYPE_CHECKING:
    import torch

Inputs = NDArray[Any]
Images = NDArray[np.uint8]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
PerFeature = tuple[float, ...]
"""A number for each channel of images, or each feature of numbers; () for tokens."""

VALIDATION = 2
Place = Callable[[int], str]  # number of a sample -> its place in the file, for errors
any_place: Place = "sample {}".format
CHUNK = 256  # samples handled at a time: all at once images are too large as floating point
MOST_BYTES_IN_MEMORY = 2**32  # bytes of inputs as float32; more stay on the disk (`StoredRows`)


class DataError(ValueError):
    """Data cannot be read or divided as asked.

    The message names the key, the value and what would be right. Control characters of a file are
    written as their numbers, as a terminal obeys some.
    """

    def __init__(self, text: str) -> None:
        lines = [printable(line, LONGEST_IN_LOG) for line in text.split("\n")]
        super().__init__("\n".join(lines))


@dataclass(frozen=True, eq=False)
class RawData:
    """A whole data set, decoded."""

    inputs: Inputs
    """uint8 [N, channels, H, W]: images; float32 [N, …]: numbers (a table [N, features], a signal
    [N, channels, steps]), standardised along their second axis; int64 [N, length]: tokens, given to
    models as they are."""
    labels: Ints
    """int64 [N], indices into ``classes``; or [N, L], of each of these 1, 0, or -1 if unknown."""
    domains: Ints
    """int64 [N], indices into ``domain_names``; all 0 when the data have no domains."""
    official: Images
    """uint8 [N]: 1 in the official test part, `VALIDATION` (2) in a validation part, else 0."""
    classes: tuple[str, ...]
    domain_names: tuple[str, ...] = ()
    """In the order of the indices; () when the data have no domains."""
    columns: tuple[str, ...] = ()
    """Of a table, in the order of its features: ``age``, ``sex:f|m``; of a text, those joined."""
    by_client: bool = False
    """The domains are a `client` column's, such as patients, whose samples stay together."""
    contents: Images = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    """uint8 [N, 16]: a digest of each sample as its owner has it, whatever the settings make of it,
    for ``test-from = "keyed"``. [0, 0] where the inputs are what the owner has: then
    `door.without_copies` makes the digests of these. [N, 0] where no such digests can be had."""
    notes: tuple[str, ...] = ()
    """Lines for their owner: what was read, and what was left out."""
    place: Place = any_place

    @property
    def task(self) -> Task:
        return task_of(self.classes, kind_of(self.labels))


# -- inputs
class StoredRows:
    """Rows int64 [N] of a memory-mapped array [M, …]: like an array that is read at each index."""

    def __init__(self, array: Inputs, rows: Ints, fill: Sequence[float] = ()) -> None:
        self.array = array
        self.rows = rows
        self.fill = fill
        self.shape = (len(rows), *array.shape[1:])
        self.dtype = array.dtype
        self.ndim = array.ndim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Inputs:
        return filled(np.asarray(self.array[self.rows[index]]), self.fill)

    def __array__(self, *_: Any, **__: Any) -> Inputs:
        return self[:]


def described(inputs: Inputs) -> str:
    """Return the type and shape of one sample in words: ``"float32 [30]"``."""
    return f"{inputs.dtype} {list(inputs.shape[1:])}"


def digests(contents: Iterable[bytes]) -> Images:
    """Return a digest of 16 bytes of each content, uint8 [N, 16]."""
    parts = [blake2b(content, digest_size=16).digest() for content in contents]
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, 16)


def are_images(inputs: Inputs) -> bool:
    return inputs.dtype == np.uint8 and inputs.ndim == 4


def resized(images: Inputs, side: int) -> Inputs:
    """Return images stretched to ``side``×``side`` pixels, bilinear and antialiased as in PIL.

    With ``side`` 0 inputs of any kind are returned as they are. Otherwise DataError if they are no
    images.
    """
    if side == 0 or (are_images(images) and images.shape[2:] == (side, side)):
        return images
    if not are_images(images):
        raise DataError(
            f"image-size = {side}: only images can be resized; a sample is {described(images)}; "
            "use 0"
        )
    import torch

    result = np.empty((*images.shape[:2], side, side), np.uint8)
    for start in range(0, len(images), CHUNK):
        floats = torch.from_numpy(np.ascontiguousarray(images[start : start + CHUNK])).float()
        stretched = torch.nn.functional.interpolate(
            floats, (side, side), mode="bilinear", antialias=True
        )
        result[start : start + CHUNK] = stretched.round().clamp(0, 255).byte().numpy()
    return result


def normalised(
    inputs: Inputs, mean: PerFeature, std: PerFeature, device: "torch.device"
) -> "torch.Tensor":
    """Return the inputs as a model takes them: (x − mean) / std per channel or feature, float32.

    Bytes are scaled to [0, 1] before. An empty ``mean`` marks tokens: these become int64, and keep
    their values.
    """
    import torch

    if not mean:
        return torch.from_numpy(np.asarray(inputs).astype(np.int64)).to(device)
    # to the GPU first: bytes are a quarter of the floats
    values = torch.from_numpy(np.array(inputs)).to(device).float()
    if inputs.dtype == np.uint8:
        values.div_(255)
    shape = _along_axis_1(inputs)
    centre = torch.tensor(mean, device=device).view(shape)
    spread = torch.tensor(std, device=device).view(shape)
    return values.sub_(centre).div_(spread)


def statistics(inputs: Inputs) -> tuple[PerFeature, PerFeature]:
    """Return the means and deviations of images' channels, in [0, 1], or of features (axis 1).

    Both are () for tokens. A constant feature gets the deviation 1, as inputs are divided by it.
    It is constant if its deviation is no more than a rounding error.
    """
    if are_images(inputs):
        mean, std = _statistics_of_channels(inputs)
    elif np.issubdtype(inputs.dtype, np.floating):
        mean, std = _statistics_of_features(inputs)
    else:
        return (), ()
    # relative to the mean, as a unit may make all values tiny: concentrations in mol/l
    # 1e-30 for a feature that is always 0
    rounding_error = float(np.finfo(np.float32).eps) * np.abs(mean) + 1e-30
    return tuple(mean.tolist()), tuple(np.where(std > rounding_error, std, 1.0).tolist())


def _statistics_of_channels(images: Images) -> tuple[Floats, Floats]:
    """Return the mean and the deviation of each channel, of pixel values scaled to [0, 1].

    They follow from how often a channel has each of the 256 values, so no image is made floating
    point: that would take ten times as long, and gigabytes for large images.
    """
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    for image in images:
        for channel, pixels in enumerate(image):
            counts[channel] += np.bincount(pixels.ravel(), minlength=256)
    values = np.arange(256) / 255
    totals = counts.sum(axis=1)
    mean = counts @ values / totals
    squares = np.square(values - mean[:, None])
    return mean, np.sqrt((counts * squares).sum(axis=1) / totals)


def _statistics_of_features(numbers: Inputs) -> tuple[Floats, Floats]:
    """Return the mean and the deviation of each feature (axis 1).

    The numbers are read chunk by chunk, as they may lie on the disk.
    """
    all_but_features = (0, *range(2, numbers.ndim))
    values_per_feature = math.prod(numbers.shape) // numbers.shape[1]
    starts = range(0, len(numbers), CHUNK)

    total: Any = 0
    for start in starts:
        chunk = numbers[start : start + CHUNK]
        total = total + chunk.sum(all_but_features, np.float64, keepdims=True)
    mean = total / values_per_feature

    squares: Any = 0
    for start in starts:
        chunk = numbers[start : start + CHUNK]
        squares = squares + np.square(chunk - mean).sum(all_but_features)
    return mean.ravel(), np.sqrt(squares / values_per_feature)


def filled(inputs: Inputs, fill: Sequence[float]) -> Inputs:
    """Return the inputs with each NaN replaced by the value that ``fill`` has for its feature.

    Features are along axis 1. With an empty ``fill`` nothing is replaced.
    """
    if not fill:
        return inputs
    values = np.array(fill, np.float32).reshape(_along_axis_1(inputs))
    return np.where(np.isnan(inputs), values, inputs)


def _along_axis_1(inputs: Inputs) -> tuple[int, ...]:
    """Return the shape in which one value per channel or feature broadcasts over ``inputs``."""
    return (-1,) + (1,) * (inputs.ndim - 2)
