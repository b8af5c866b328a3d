"""Python's own objects as data: one way in for training and for prediction."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from protofl_common.basics.text import first_of, printable
from protofl_common.data.door import as_array, checked_inputs, is_number
from protofl_common.data.own import tokens, with_label
from protofl_common.data.raw import DataError, Inputs, Place, any_place, described
from protofl_common.data.table import Columns, TableFile, name_and_categories, read_columns

PARTS = {2: ("inputs", "labels"), 4: ("x_train", "y_train", "x_test", "y_test")}
"""Length of a tuple of arrays -> the arrays' names."""
TAKEN = (
    "a file or folder, (inputs, labels), (x_train, y_train, x_test, y_test), a dictionary of such "
    "arrays, a TensorDataset, a series of pairs (input, label), or a data frame with a column label"
)


class Wanted(Protocol):
    """What a model takes, as its card says."""

    @property
    def input_type(self) -> str: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def fill(self) -> tuple[float, ...]: ...


def is_frame(data: Any) -> bool:
    """True for a data frame of pandas, which need not be installed."""
    return hasattr(data, "assign") and hasattr(data, "columns")


def as_arrays(data: Any, *, alone: bool = False) -> dict[str, Any]:
    """Return the arrays of a Python object by the names that an ``.npz`` file gives them.

    These are ``inputs`` and ``labels``, or ``x_train`` and so on. ``data`` is one of `TAKEN`, but
    neither a file nor a data frame; DataError for another object. With ``alone`` it may be inputs
    without labels: all but a dictionary and a tuple are then taken for these. A tuple or list of as
    many entries as `PARTS` has is taken for the arrays, a longer one for pairs (input, label).
    """
    data = getattr(data, "tensors", data)  # a TensorDataset's, which are a tuple
    if isinstance(data, Mapping):
        return _with_label_names({str(name): value for name, value in data.items()})
    if alone and not isinstance(data, tuple):
        return {"inputs": data}
    if alone and len(data) == 1:  # a TensorDataset of inputs
        return {"inputs": data[0]}
    # as Keras loads a data set: (x_train, y_train), (x_test, y_test)
    if isinstance(data, tuple) and len(data) == 2 and all(map(_is_pair, data)):
        data = (*data[0], *data[1])
    if isinstance(data, tuple | list) and len(data) in PARTS:
        return _with_label_names(dict(zip(PARTS[len(data)], data, strict=True)))

    # what is left are pairs (input, label); an array, which has a dtype, is no series of them
    samples = list(data) if isinstance(data, Iterable) and not hasattr(data, "dtype") else []
    if not samples or not all(map(_is_pair, samples)):
        raise DataError(f"data: {type(data).__name__} is none of {TAKEN}")
    return {
        "inputs": [as_array(inputs, "data: inputs") for inputs, _ in samples],
        "labels": [label for _, label in samples],
    }


def _with_label_names(arrays: dict[str, Any]) -> dict[str, Any]:
    """Add as ``classes`` the names of the columns of a data frame that has several labels a sample.

    Without these names the first column would be taken for the run's first label, and so on. All
    parts of the inputs must have the same columns, and so must all parts of the labels.
    """
    _check_same_columns(arrays, "x_")
    _check_same_columns(arrays, "y_")
    labels: Any = arrays.get("labels", arrays.get("y_train"))
    if not is_frame(labels) or len(labels.columns) < 2:
        return arrays
    return {"classes": [str(name) for name in labels.columns], **arrays}


def _check_same_columns(arrays: dict[str, Any], beginning: str) -> None:
    """Raise DataError for data frames that differ in their columns, as ``x_train`` and ``x_test``.

    Those are compared whose names have this ``beginning``. As arrays they would be joined by the
    order of their columns, whatever these are called.
    """
    columns = {}
    for name, value in arrays.items():
        if name.startswith(beginning) and is_frame(value):
            columns[name] = ", ".join(map(str, value.columns))
    first = next(iter(columns), "")
    for name, names in columns.items():
        if names != columns[first]:
            wanted = f"{first} has the columns {printable(columns[first], 200)}"
            cure = "give both the same columns, in one order"
            raise DataError(f"data: {wanted}; {name} has {printable(names, 200)}; {cure}")


def joined_frames(frame: Any, labels: Any) -> Any:
    """Return a data frame with the columns of ``frame`` and the labels, one or several a sample.

    ``labels`` are a series of them, or a data frame. Of several labels a sample each keeps its
    name. DataError if both frames have a column of one name, or other numbers of rows.
    """
    if len(frame) != len(labels):
        raise DataError(f"data: {len(labels)} labels; there are {len(frame)} inputs")
    if is_frame(labels) and len(labels.columns) == 1:
        labels = labels.iloc[:, 0]
    if not is_frame(labels):
        return frame.assign(label=list(labels))
    of_inputs = set(map(str, frame.columns))
    both = [str(name) for name in labels.columns if str(name) in of_inputs]
    if both:
        raise DataError(f"data: inputs and labels both have the columns {first_of(both)}")
    return frame.assign(**{str(name): list(labels[name]) for name in labels.columns})


def _is_pair(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2


def inputs_for(card: Wanted, data: Any, where: str = "inputs", place: Place = any_place) -> Inputs:
    """Return the inputs [N, …] for a prediction, as the model of the ``card`` takes them.

    ``data`` are arrays, a data frame, or a file that has been read; labels among them are ignored.
    They pass the checks of training data. NaN is allowed only if the model fills gaps. DataError
    names them as ``where``, and a sample by ``place``.
    """
    if is_frame(data):
        data = Columns.of_frame(data, where)
    if isinstance(data, Columns):
        place = data.place
        data = _of_table(card, data)
    else:
        arrays = as_arrays(data, alone=True)
        if "inputs" not in arrays:
            names = ", ".join(map(repr, arrays))
            raise DataError(f"{where}: has no array 'inputs', only {names}")
        data = arrays["inputs"]

    array = as_array(data, where, are_names=False)
    if array.dtype.kind in "US" and card.input_type == "int64":
        columns = ", ".join(card.columns) or "text"
        raise DataError(f"{where}: are texts; give a data frame of these columns: {columns}")
    if array.dtype.kind in "iu" and card.input_type != "uint8":  # of any width
        array = array.astype("int64" if card.input_type == "int64" else "float64")
    inputs = checked_inputs(array, where, place, gaps=bool(card.fill))
    if inputs.dtype != card.input_type or inputs.shape[1:] != card.input_shape:
        wanted = f"the model takes {card.input_type} {list(card.input_shape)}"
        raise DataError(f"{where}: a sample is {described(inputs)}; {wanted}")
    return inputs


def _of_table(card: Wanted, table: Columns) -> Inputs:
    """Return the inputs [N, …] from those columns of a table that the model was trained on.

    The columns are found by their names. The card of a model that was trained on arrays, or on
    texts in files without a header, has none: then all columns that may be inputs are taken.
    DataError for a column that is missing, or that stands there twice, and for a file whose first
    row has no names.
    """
    is_text = card.input_type == "int64"  # tokens
    wanted = list(card.columns)
    if not card.columns and isinstance(table, TableFile):
        table = _with_names(table, is_text)
    if not is_text:  # a column of categories is called ``sex:f|m`` on the card
        wanted = [name_and_categories(column)[0] for column in card.columns]
    times = Counter(table.names)
    for name in wanted:
        if times[name] != 1:
            has = "several columns are called" if times[name] else "has no column"
            takes = f"the model takes {', '.join(wanted)}"
            raise DataError(f"{table.where}: {has} {name!r}; {takes}")
    columns = card.columns or table.others
    if is_text:
        return tokens(table.texts(columns), card.input_shape[0])
    return read_columns(
        table.columns, columns, table.where, table.place, gaps=bool(card.fill), proposes=False
    )


def _with_names(table: TableFile, is_text: bool) -> TableFile:
    """Return the table of a file whose first row may be a sample, and no names.

    A file of texts may be as in training, with the label first (`own.with_label`). DataError if the
    first row has numbers, or texts that may be a sample.
    """
    if is_text:
        return with_label(table.file)
    counted = [str(number) for number in range(len(table.names))]  # as pandas calls columns
    if all(map(is_number, table.names)) and table.names != counted:
        cure = "give the columns names in a first row"
        raise DataError(f"{table.where}: its first row has numbers, and no names; {cure}")
    return table
