"""The decoded data set that every source delivers, its inputs, and how models see them.

Inputs [N, …] are images uint8 [N, channels, H, W], numbers (floating point) or tokens (integers).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import with_composed_letters

if TYPE_CHECKING:
    import torch

Inputs = NDArray[Any]
Images = NDArray[np.uint8]
Ints = NDArray[np.int64]

VALIDATION = 2
KEYS = ("inputs", "labels", "client", "split", "classes", "domain")
SPLITS = {
    "train": 0,
    "test": 1,
    "validation": VALIDATION,
    "0": 0,
    "1": 1,
    "2": VALIDATION,
    "False": 0,
    "True": 1,
}
Place = Callable[[int], str]  # number of a sample -> its place in the file, for errors
CHUNK = 2048  # images handled at a time: all at once they are too large to be made floating point
GAPS = frozenset(("", "?", "na", "n/a", "nan", "null", "none"))  # in lower case
FEW_CLASSES = 20  # different labels that are taken for classes, whatever they look like
MOST_BYTES_IN_MEMORY = 2**32  # bytes of inputs as float32; more stay on the disk (`StoredRows`)


class DataError(ValueError):
    """Data cannot be read or divided as asked.

    The message names the key, the value and what would be right.
    """


@dataclass(frozen=True, eq=False)
class RawData:
    """A whole data set, decoded."""

    inputs: Inputs
    """uint8 [N, channels, H, W]: images; float32 [N, …]: numbers (a table [N, features], a signal
    [N, channels, steps]), standardised along their second axis; int64 [N, length]: tokens, given to
    models as they are."""
    labels: Ints
    """int64 [N], indices into ``classes``."""
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


def from_arrays(
    arrays: Mapping[str, Any],
    where: str,
    classes: str = "",
    place: Place = "sample {}".format,
    gaps: bool = False,
) -> RawData:
    """Check named arrays and make a data set of them.

    Errors name the arrays by ``where`` and a sample by ``place``. The arrays:

    ``inputs``   [N, …]: images uint8 [N, channels, H, W]; numbers, floating point (a table
                 [N, features], a signal [N, channels, steps], …); tokens, whole numbers from 0
                 [N, length], where 0 is padding.
    ``labels``   [N], an array also [N, 1]: names, or whole numbers.
    ``client``   [N], optional: whose it is (``partition = "natural"``, or a patient); or
                 ``domain``: of which scanner.
    ``split``    [N], optional: ``train`` or ``test`` (or 0 or 1), for ``test-from = "official"``
                 and its like; or ``validation`` (2), which counts always.
    ``classes``  optional: names in label order; labels that are numbers are then indices into them.

    The setting ``classes`` comes before the array. Where one of its names is a number (or True),
    labels are names; else numbers are indices. Without either the classes are the labels that
    occur, sorted: sites may then differ.

    DataError when something is missing, of the wrong type or length, or not finite; with ``gaps``,
    numbers may be NaN.
    """
    for key in ("inputs", "labels"):
        if arrays.get(key) is None:
            present = ", ".join(map(repr, arrays)) or "nothing"
            raise DataError(f"{where}: has no {key!r}, only {present}")
    inputs = _inputs(arrays["inputs"], where, place, gaps)
    labels = arrays["labels"]
    if getattr(labels, "shape", ())[1:] == (1,):  # a column, as Keras and MATLAB give labels
        labels = np.asarray(labels)[:, 0]
    _check_one_label_each(labels, where)

    owner = "client" if arrays.get("client") is not None else "domain"
    columns = {"labels": np.asarray(labels)}
    for key in (owner, "split"):
        if arrays.get(key) is not None:
            columns[key] = np.asarray(arrays[key])
    for key, column in columns.items():
        if column.shape != (len(inputs),):
            shape = list(column.shape)
            raise DataError(f"{where}: {key} has shape {shape}; there are {len(inputs)} inputs")
        _check_none_missing(column, key, where, place)

    from_setting = class_names(classes)
    names = from_setting or _class_array(arrays.get("classes"), where)
    labels, names = _labels(columns["labels"], names, bool(from_setting), where, place)
    domains = np.zeros_like(labels)
    domain_names: tuple[str, ...] = ()
    if owner in columns:
        owners = [with_composed_letters(name) for name in columns[owner].astype(str)]
        unique, domains = np.unique(owners, return_inverse=True)
        domain_names = tuple(unique.tolist())
    official = np.zeros(len(inputs), np.uint8)
    if "split" in columns:
        official = _official(columns["split"], where, place)
    return RawData(
        inputs, labels, domains, official, names, domain_names, by_client=owner == "client"
    )


def class_names(classes: str) -> tuple[str, ...]:
    """The names in the setting ``classes``, in label order; they must be different."""
    if not classes:
        return ()
    names = tuple(name.strip() for name in classes.split(","))
    if "" in names or len(set(names)) < len(names):
        raise DataError(f"classes = {classes!r}: must be different names, separated by commas")
    return names


def _inputs(value: Any, where: str, place: Place, gaps: bool) -> Inputs:
    """The inputs as one of the three kinds, contiguous; DataError names what is wrong with them."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where}: inputs differ in shape ({error})") from error
    shape = list(array.shape)
    if array.ndim < 2 or not array.size or array.dtype.kind not in "biuf":
        wanted = "not numbers [N, …] of some samples"
        raise DataError(f"{where}: inputs are {array.dtype} {shape}, {wanted}")
    if array.ndim == 4 and shape[3] in (1, 3, 4) and shape[1] == shape[2] > 4:
        wanted = "images are [N, channels, H, W], the channels first"
        raise DataError(f"{where}: inputs are {shape}: {wanted}")
    if array.dtype.kind in "iu":
        return _whole_numbers(array, where, place)

    array = np.ascontiguousarray(array, dtype=np.float32)
    wrong = np.isinf(array) if gaps else ~np.isfinite(array)
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0].tolist())
        what = f"{place(first[0])} has {array[first]} at {list(first[1:])}"
        raise DataError(f"{where}: {what}; fill it in, or impute")
    return array


def _whole_numbers(array: NDArray[Any], where: str, place: Place) -> Inputs:
    """Images as uint8, or tokens as int64."""
    are_bytes = array.dtype == np.uint8
    if array.ndim != (4 if are_bytes else 2):
        kinds = "bytes must be images [N, channels, H, W], other whole numbers tokens [N, length]"
        cure = "give numbers as floating point, and images of more than 8 bits"
        raise DataError(f"{where}: inputs are {array.dtype} {list(array.shape)}: {kinds}; {cure}")
    if are_bytes:
        return np.ascontiguousarray(array)
    if array.dtype.kind == "i" and (array < 0).any():
        row = int(np.argwhere(array < 0)[0][0])
        cure = "give numbers as floating point"
        raise DataError(f"{where}: {place(row)} has a token below 0; {cure}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_one_label_each(labels: Any, where: str) -> None:
    for label in labels:
        if not isinstance(label, str | np.generic) and np.ndim(label):
            several = "several labels of a sample (multi-label) cannot be learned"
            raise DataError(
                f"{where}: the first label is {label!r}: {several}, only one class of each"
            )


def _check_none_missing(column: NDArray[Any], key: str, where: str, place: Place) -> None:
    """DataError for None, NaN (also as text) or "": it would be a class or a client of its own."""
    is_none = column == None  # noqa: E711 (each element)
    is_nan = (column != column) | (column == "nan")
    missing = np.flatnonzero((column == "") | is_none | is_nan)
    if not len(missing):
        return
    row = int(missing[0])
    what = "label" if key == "labels" else key
    many = f"{column.tolist()[row]!r}; {len(missing)} in all"
    raise DataError(f"{where}: {place(row)} has no {what} ({many}); fill it in, or leave it out")


def _class_array(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    names: tuple[str, ...] = ()
    if not isinstance(value, str | bytes):
        names = tuple(with_composed_letters(str(name)) for name in value)
    if not names or "" in names or len(set(names)) < len(names):
        raise DataError(f"{where}: classes = {value!r}: must be different names, in label order")
    return names


def _labels(
    column: NDArray[Any], names: tuple[str, ...], from_setting: bool, where: str, place: Place
) -> tuple[Ints, tuple[str, ...]]:
    """Labels int64 [N] and the names of the classes: without ``names`` the labels that occur."""
    if column.dtype.kind == "f" and (column == column.round()).all():
        column = column.astype(np.int64)
    are_numbers = column.dtype.kind in "biu"
    if not names:
        values: Any = column
        if not are_numbers:
            values = [with_composed_letters(name) for name in column.astype(str)]
        classes, labels = np.unique(values, return_inverse=True)
        check_classes(classes.tolist(), len(labels), where)
        return labels.astype(np.int64), tuple(map(str, classes))

    names_are_numbers = any(name.lstrip("-").isdecimal() or name == "True" for name in names)
    if are_numbers and not (from_setting and names_are_numbers):
        labels = column.astype(np.int64)
    else:
        index = {name: position for position, name in enumerate(names)}
        labels = np.array(
            [index.get(with_composed_letters(str(value)), -1) for value in column], dtype=np.int64
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(wrong):
        row = int(wrong[0])
        which = f"{place(row)} has the label {str(column[row])!r}, which is none of"
        key = f"classes = {','.join(names)!r}" if from_setting else f"classes {', '.join(names)}"
        raise DataError(f"{where}: {which} {key}")
    return labels, names


def check_classes(classes: Sequence[Any], samples: float, where: str) -> None:
    """DataError for labels that are no classes.

    They are quantities, names of samples, stand for no label, or spell one class in two ways.
    """
    meanings = [_meaning(name) for name in classes]
    times = Counter(meanings)
    doubtful = [
        repr(name)
        for name, meaning in zip(classes, meanings, strict=True)
        if times[meaning] > 1 or meaning in GAPS - {"none"}
    ]
    if doubtful:
        alike = "are alike but for capitals and spaces, or stand for none"
        cure = "correct them, or name them in `classes`"
        raise DataError(f"{where}: the labels {', '.join(doubtful[:FEW_CLASSES])} {alike}; {cure}")

    number = len(classes)
    several = f"the labels have {number} different values of {samples} samples"
    several = f"{where}: {several}, such as {classes[0]!r}"
    are_whole = isinstance(classes[0], int)
    if number > FEW_CLASSES and not are_whole and all(map(is_number, classes)):
        cure = "make classes of them, as low and high"
        raise DataError(f"{several}: quantities (regression) cannot be learned; {cure}")
    if number > max(FEW_CLASSES, samples / 2):
        cure = "name `classes` if they are some"
        raise DataError(f"{several}: no classes, but quantities or names of samples; {cure}")


def _meaning(label: Any) -> float | str:
    """A label without its capitals and spaces, or its number."""
    if is_number(label):
        return float(label)
    return "".join(label.casefold().split())


def is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (ValueError, TypeError):
        return False


def _official(column: NDArray[Any], where: str, place: Place) -> Images:
    parts = [SPLITS.get(str(value)) for value in column]
    if None in parts:
        row = parts.index(None)
        wanted = "must be train, validation or test"
        raise DataError(f"{where}: {place(row)} has split {str(column[row])!r}; {wanted}")
    if all(parts):
        raise DataError(f"{where}: split marks no sample for training")
    return np.array(parts, np.uint8)


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
    """Type and shape of a sample: ``"float32 [30]"``."""
    return f"{inputs.dtype} {list(inputs.shape[1:])}"


def are_images(inputs: Inputs) -> bool:
    return inputs.dtype == np.uint8 and inputs.ndim == 4


def resized(images: Inputs, side: int) -> Inputs:
    """The images stretched to ``side``×``side`` pixels; 0: as they are.

    Bilinear, and antialiased as in PIL.
    """
    if side == 0 or (are_images(images) and images.shape[2:] == (side, side)):
        return images
    if not are_images(images):
        sample = f"a sample is {described(images)}"
        raise DataError(f"image-size = {side}: only images can be resized; {sample}; use 0")
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
    inputs: Inputs, mean: Sequence[float], std: Sequence[float], device: "torch.device"
) -> "torch.Tensor":
    """float32 (x − mean) / std per channel or feature; bytes are scaled to [0, 1] first.

    Without ``mean`` they are tokens: int64, as they are.
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


def statistics(inputs: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel (in [0, 1]) or feature, axis 1; () for tokens.

    A deviation of 0, but for rounding, is given as 1.
    """
    rounding: float | NDArray[np.float64] = 1e-6
    if are_images(inputs):
        mean, std = _channel_statistics(inputs)
    elif np.issubdtype(inputs.dtype, np.floating):
        mean, std = _feature_statistics(inputs)
        # the unit may be any, as concentrations in mol/l
        rounding = float(np.finfo(np.float32).eps) * np.abs(mean) + 1e-30
    else:
        return (), ()
    return tuple(mean.tolist()), tuple(np.where(std > rounding, std, 1.0).tolist())


def _feature_statistics(numbers: Inputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each feature, chunk by chunk: the numbers may lie on the disk."""
    all_but_features = (0, *range(2, numbers.ndim))
    values_of_each = math.prod(numbers.shape) // numbers.shape[1]
    starts = range(0, len(numbers), CHUNK)

    total: Any = 0
    for start in starts:
        chunk = numbers[start : start + CHUNK]
        total = total + chunk.sum(all_but_features, np.float64, keepdims=True)
    mean = total / values_of_each

    squares: Any = 0
    for start in starts:
        chunk = numbers[start : start + CHUNK]
        squares = squares + np.square(chunk - mean).sum(all_but_features)
    return mean.ravel(), np.sqrt(squares / values_of_each)


def filled(inputs: Inputs, fill: Sequence[float]) -> Inputs:
    """The inputs with the value of its feature (axis 1) in the place of NaN; () fills nothing."""
    if not fill:
        return inputs
    values = np.array(fill, np.float32).reshape(_along_axis_1(inputs))
    return np.where(np.isnan(inputs), values, inputs)


def _along_axis_1(inputs: Inputs) -> tuple[int, ...]:
    """The shape of one value per channel or feature that broadcasts over ``inputs``."""
    return (-1,) + (1,) * (inputs.ndim - 2)


def _channel_statistics(images: Images) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    step = max(1, 2**22 // images[0, 0].size)  # counting takes 8 bytes a pixel
    for start in range(0, len(images), step):
        chunk = images[start : start + step]
        for channel in range(len(counts)):
            counts[channel] += np.bincount(chunk[:, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    totals = counts.sum(axis=1)
    mean = counts @ values / totals
    variance = counts @ values**2 / totals - mean**2
    return mean, np.sqrt(np.maximum(variance, 0))
