"""The decoded data set that every source delivers, made of checked arrays; its inputs, and how models see them.

Inputs [N, …] are images uint8 [N, channels, H, W], numbers (floating point) or tokens (integers).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import composed

if TYPE_CHECKING:
    import torch

Inputs = NDArray[Any]
Images = NDArray[np.uint8]
Ints = NDArray[np.int64]

VALIDATION = 2
KEYS = ("inputs", "labels", "client", "split", "classes", "domain")
SPLITS = {"train": 0, "test": 1, "validation": VALIDATION, "0": 0, "1": 1, "2": VALIDATION, "False": 0, "True": 1}
Place = Callable[[int], str]  # number of a sample -> its place in the file, for errors
CHUNK = 2048  # images handled at a time: all at once they are too large to be made floating point
GAPS = frozenset(("", "?", "na", "n/a", "nan", "null", "none"))  # in lower case
FEW_CLASSES = 20  # different labels that are taken for classes, whatever they look like
MOST_IN_MEMORY = 2**32  # bytes of inputs as float32; more stay on the disk (`StoredRows`)


class DataError(ValueError):
    """Data cannot be read or divided as asked; the message names the key, the value and what would be right."""


@dataclass(frozen=True, eq=False)
class RawData:
    """A whole data set, decoded."""

    inputs: Inputs
    """uint8 [N, channels, H, W]: images; float32 [N, …]: numbers (a table [N, features], a signal [N, channels,
    steps]), standardised along their second axis; int64 [N, length]: tokens, given to models as they are."""
    labels: Ints  # int64 [N], indices into ``classes``
    domains: Ints  # int64 [N], indices into ``domain_names``; all 0 when the data have no domains
    official: Images  # uint8 [N]: 1 in the official test part, `VALIDATION` (2) in a validation part, 0 for all others
    classes: tuple[str, ...]
    domain_names: tuple[str, ...] = ()  # in the order of the indices; () when the data have no domains
    columns: tuple[str, ...] = ()  # of a table, in the order of its features: ``age``, ``sex:f|m``; of a text, joined
    by_client: bool = False  # the domains are a `client` column's, such as patients, whose samples stay together


def from_arrays(
    arrays: Mapping[str, Any], where: str, classes: str = "", place: Place = "sample {}".format, gaps: bool = False
) -> RawData:
    """Check named arrays and make a data set of them; errors name the arrays by ``where`` and a sample by ``place``.

    ``inputs``   [N, …]: images uint8 [N, channels, H, W]; numbers, floating point (a table [N, features], a signal
                 [N, channels, steps], …); tokens, whole numbers from 0 [N, length], where 0 is padding.
    ``labels``   [N], an array also [N, 1]: names, or whole numbers.
    ``client``   [N], optional: whose it is (``partition = "natural"``, or a patient); or ``domain``: of which scanner.
    ``split``    [N], optional: ``train`` or ``test`` (or 0 or 1), for ``test-from = "official"`` and its like; or
                 ``validation`` (2), which counts always.
    ``classes``  optional: names in label order; labels that are numbers are then indices into them.

    The setting ``classes`` comes before the array. Where one of its names is a number (or True), labels are names; else
    numbers are indices. Without either the classes are the labels that occur, sorted: sites may then differ.

    DataError when something is missing, of the wrong type or length, or not finite; with ``gaps``, numbers may be NaN.
    """
    for key in ("inputs", "labels"):
        if arrays.get(key) is None:
            raise DataError(f"{where}: has no {key!r}, only {', '.join(map(repr, arrays)) or 'nothing'}")
    inputs = _inputs(arrays["inputs"], where, place, gaps)
    if getattr(arrays["labels"], "shape", ())[1:] == (1,):  # a column, as Keras and MATLAB give labels
        arrays = {**arrays, "labels": np.asarray(arrays["labels"])[:, 0]}
    if lists := [label for label in arrays["labels"] if not isinstance(label, str | np.generic) and np.ndim(label)]:
        several = "several labels of a sample (multi-label) cannot be learned, only one class of each"
        raise DataError(f"{where}: the first label is {lists[0]!r}: {several}")
    owner = "client" if arrays.get("client") is not None else "domain"
    columns = {key: np.asarray(arrays[key]) for key in ("labels", owner, "split") if arrays.get(key) is not None}
    for key, column in columns.items():
        if column.shape != (len(inputs),):
            raise DataError(f"{where}: {key} has shape {list(column.shape)}; there are {len(inputs)} inputs")
        _check_none_missing(column, key, where, place)
    from_setting = class_names(classes)
    names = from_setting or _class_array(arrays.get("classes"), where)
    labels, names = _labels(columns["labels"], names, bool(from_setting), where, place)
    clients = [*map(composed, columns[owner].astype(str))] if owner in columns else []
    domain_names, domains = np.unique(clients, return_inverse=True) if clients else ((), np.zeros_like(labels))
    official = _official(columns["split"], where, place) if "split" in columns else np.zeros(len(inputs), np.uint8)
    return RawData(inputs, labels, domains, official, names, tuple(map(str, domain_names)), by_client=owner == "client")


def class_names(classes: str) -> tuple[str, ...]:
    """The names in the setting ``classes``, in label order; DataError when a name is empty or stands twice."""
    names = tuple(name.strip() for name in classes.split(",")) if classes else ()
    if "" in names or len(set(names)) < len(names):
        raise DataError(f"classes = {classes!r}: must be different names, separated by commas")
    return names


def _inputs(value: Any, where: str, place: Place, gaps: bool) -> Inputs:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where}: inputs differ in shape ({error})") from error
    if array.ndim < 2 or not array.size or array.dtype.kind not in "biuf":
        raise DataError(f"{where}: inputs are {array.dtype} {list(array.shape)}, not numbers [N, …] of some samples")
    if array.ndim == 4 and array.shape[3] in (1, 3, 4) and array.shape[1] == array.shape[2] > 4:
        raise DataError(f"{where}: inputs are {list(array.shape)}: images are [N, channels, H, W], the channels first")
    if array.dtype.kind in "iu":
        if array.ndim != (4 if array.dtype == np.uint8 else 2):
            kinds = "bytes must be images [N, channels, H, W], other whole numbers tokens [N, length]"
            cure = "give numbers as floating point, and images of more than 8 bits"
            raise DataError(f"{where}: inputs are {array.dtype} {list(array.shape)}: {kinds}; {cure}")
        if array.dtype.kind == "i" and (array < 0).any():
            row = int(np.argwhere(array < 0)[0][0])
            raise DataError(f"{where}: {place(row)} has a token below 0; give numbers as floating point")
        return np.ascontiguousarray(array, dtype=np.uint8 if array.dtype == np.uint8 else np.int64)
    array = np.ascontiguousarray(array, dtype=np.float32)
    if (wrong := np.isinf(array) if gaps else ~np.isfinite(array)).any():
        first = tuple(np.argwhere(wrong)[0].tolist())
        raise DataError(f"{where}: {place(first[0])} has {array[first]} at {list(first[1:])}; fill it in, or impute")
    return array


def _check_none_missing(column: NDArray[Any], key: str, where: str, place: Place) -> None:
    """DataError for None, NaN (also as text) or "" among the values, which would be a class or a client of its own."""
    missing = np.flatnonzero((column == "") | (column == "nan") | (column == None) | (column != column))  # noqa: E711
    if len(missing):
        row, what = int(missing[0]), {"labels": "label"}.get(key, key)
        many = f"{column.tolist()[row]!r}; {len(missing)} in all"
        raise DataError(f"{where}: {place(row)} has no {what} ({many}); fill it in, or leave it out")


def _class_array(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    names = () if isinstance(value, str | bytes) else tuple(composed(str(name)) for name in value)
    if not names or "" in names or len(set(names)) < len(names):
        raise DataError(f"{where}: classes = {value!r}: must be different names, in label order")
    return names


def _labels(
    column: NDArray[Any], names: tuple[str, ...], from_setting: bool, where: str, place: Place
) -> tuple[Ints, tuple[str, ...]]:
    """Labels int64 [N] and the names of the classes, which are the labels that occur where ``names`` is empty."""
    if column.dtype.kind == "f" and (column == column.round()).all():
        column = column.astype(np.int64)
    numbers = column.dtype.kind in "biu"
    if not names:
        classes, labels = np.unique(column if numbers else [*map(composed, column.astype(str))], return_inverse=True)
        check_classes(classes.tolist(), len(labels), where)
        return labels.astype(np.int64), tuple(map(str, classes))
    if numbers and not (from_setting and any(name.lstrip("-").isdecimal() or name == "True" for name in names)):
        labels = column.astype(np.int64)
    else:
        index = {name: position for position, name in enumerate(names)}
        labels = np.array([index.get(composed(str(value)), -1) for value in column], dtype=np.int64)
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= len(names)))):
        row = int(wrong[0])
        key = f"classes = {','.join(names)!r}" if from_setting else f"classes {', '.join(names)}"
        raise DataError(f"{where}: {place(row)} has the label {str(column[row])!r}, which is none of {key}")
    return labels, names


def check_classes(classes: Sequence[Any], samples: float, where: str) -> None:
    """DataError for labels that are rather quantities, names of samples, no label, or one class in two spellings."""
    senses = [float(name) if is_number(name) else "".join(name.casefold().split()) for name in classes]
    times = Counter(senses)
    if odd := [name for name, of in zip(classes, senses, strict=True) if times[of] > 1 or of in GAPS - {"none"}]:
        alike = "are alike but for capitals and spaces, or stand for none; correct them, or name them in `classes`"
        raise DataError(f"{where}: the labels {', '.join(map(repr, odd[:FEW_CLASSES]))} {alike}")
    several = f"{where}: the labels have {len(classes)} different values of {samples} samples, such as {classes[0]!r}"
    if len(classes) > FEW_CLASSES and not isinstance(classes[0], int) and all(map(is_number, classes)):
        raise DataError(f"{several}: quantities (regression) cannot be learned; make classes of them, as low and high")
    if len(classes) > max(FEW_CLASSES, samples / 2):
        raise DataError(f"{several}: no classes, but quantities or names of samples; name `classes` if they are some")


def is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (ValueError, TypeError):
        return False


def _official(column: NDArray[Any], where: str, place: Place) -> Images:
    parts = [SPLITS.get(str(value)) for value in column]
    if None in parts:
        row = parts.index(None)
        raise DataError(f"{where}: {place(row)} has split {str(column[row])!r}; must be train, validation or test")
    if all(parts):
        raise DataError(f"{where}: split marks no sample for training")
    return np.array(parts, np.uint8)


# -- inputs
class StoredRows:
    """Rows int64 [N] of a memory-mapped array [M, …]: like an array, but each index reads from the disk."""

    def __init__(self, array: Inputs, rows: Ints, fill: Sequence[float] = ()) -> None:
        self.array, self.rows, self.fill = array, rows, fill
        self.shape, self.dtype, self.ndim = (len(rows), *array.shape[1:]), array.dtype, array.ndim

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Inputs:
        return filled(np.asarray(self.array[self.rows[index]]), self.fill)

    def __array__(self, *_: Any, **__: Any) -> Inputs:
        return self[:]


def described(inputs: Inputs) -> str:
    """Type and shape of a sample: ``"float32 [30]"``."""
    return f"{inputs.dtype} {list(inputs.shape[1:])}"


def are_images(inputs: Inputs) -> bool:
    return inputs.dtype == np.uint8 and inputs.ndim == 4


def resized(images: Inputs, side: int) -> Inputs:
    """The images stretched to ``side``×``side`` pixels (bilinear, antialiased as in PIL); 0: as they are."""
    if side == 0 or (are_images(images) and images.shape[2:] == (side, side)):
        return images
    if not are_images(images):
        raise DataError(f"image-size = {side}: only images can be resized; a sample is {described(images)}; use 0")
    import torch

    result = np.empty((*images.shape[:2], side, side), np.uint8)
    for start in range(0, len(images), CHUNK):
        floats = torch.from_numpy(np.ascontiguousarray(images[start : start + CHUNK])).float()
        stretched = torch.nn.functional.interpolate(floats, (side, side), mode="bilinear", antialias=True)
        result[start : start + CHUNK] = stretched.round().clamp(0, 255).byte().numpy()
    return result


def normalised(inputs: Inputs, mean: Sequence[float], std: Sequence[float], device: "torch.device") -> "torch.Tensor":
    """float32 (x − mean) / std per channel or feature, bytes scaled to [0, 1] first; without ``mean`` int64 tokens."""
    import torch

    if not mean:
        return torch.from_numpy(np.asarray(inputs).astype(np.int64)).to(device)
    values = torch.from_numpy(np.array(inputs)).to(device).float()  # bytes take a quarter of the way to a GPU
    if inputs.dtype == np.uint8:
        values.div_(255)
    shape = (-1, *(1,) * (inputs.ndim - 2))
    centre, spread = (torch.tensor(value, device=device).view(shape) for value in (mean, std))
    return values.sub_(centre).div_(spread)


def statistics(inputs: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation, 1 in the place of 0, of each channel (in [0, 1]) or feature, axis 1; () for tokens."""
    rounding: float | NDArray[np.float64] = 1e-6
    if are_images(inputs):
        mean, std = _channel_statistics(inputs)
    elif np.issubdtype(inputs.dtype, np.floating):
        mean, std = _feature_statistics(inputs)
        rounding = float(np.finfo(np.float32).eps) * np.abs(mean) + 1e-30  # of any unit, as concentrations in mol/l
    else:
        return (), ()
    return tuple(mean.tolist()), tuple(np.where(std > rounding, std, 1.0).tolist())


def _feature_statistics(numbers: Inputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each feature, chunk by chunk: the numbers may lie on the disk."""
    others, total = (0, *range(2, numbers.ndim)), math.prod(numbers.shape) // numbers.shape[1]
    starts = range(0, len(numbers), CHUNK)
    mean = sum(numbers[start : start + CHUNK].sum(others, np.float64, keepdims=True) for start in starts) / total
    square = sum(np.square(numbers[start : start + CHUNK] - mean).sum(others) for start in starts) / total
    return mean.ravel(), np.sqrt(square)


def filled(inputs: Inputs, fill: Sequence[float]) -> Inputs:
    """The inputs with the value of its feature (axis 1) in the place of NaN; without ``fill`` as they are."""
    if not fill:
        return inputs
    return np.where(np.isnan(inputs), np.array(fill, np.float32).reshape(-1, *(1,) * (inputs.ndim - 2)), inputs)


def _channel_statistics(images: Images) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    step = max(1, 2**22 // images[0, 0].size)  # counting takes 8 bytes a pixel
    for start in range(0, len(images), step):
        for channel, count in enumerate(counts):
            count += np.bincount(images[start : start + step][:, channel].ravel(), minlength=256)
    values, totals = np.arange(256) / 255, counts.sum(axis=1)
    mean = counts @ values / totals
    return mean, np.sqrt(np.maximum(counts @ values**2 / totals - mean**2, 0))
