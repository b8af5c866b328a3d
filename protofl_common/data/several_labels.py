"""Several labels a sample, as their owner gives them: a number for each, or the names that hold.

Both become int64 [N, L]: 1 for a label that holds, 0 for one that does not, -1 for one that nobody
has looked for. Names decide, not their order: a label of the run that the data do not name is
unknown for all samples. What else is in the data is named, with its place and a cure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import first_of, printable
from protofl_common.config.lists import as_list, names_in
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import GAPS, as_array, check_class_names, class_names, number
from protofl_common.data.raw import DataError, Ints, Place
from protofl_common.tasks import UNLABELLED, MultiLabel

JOINT = "|"  # between the names of the labels of a sample
NO_FINDING = "no finding"  # stands in the place of names where no label holds, in any letters
JOINED = ("labels", "label")  # columns of such names
UNCERTAIN = -1.0


class ReadLabels(NamedTuple):
    """Labels [N, L], their names, and lines for their owner."""

    labels: Ints
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SeveralLabels:
    """How the labels of a data set are to be read."""

    names: tuple[str, ...] = ()
    """Those of the run, in its order (setting ``classes``); () for those that occur."""
    meaning: Mapping[str, str] = field(default_factory=dict)
    """A name in the data -> the label that it stands for, "" for none (setting ``label-map``)."""
    uncertain: str = "refuse"
    """What -1 stands for: ``refuse``, ``missing``, ``0`` or ``1``."""

    @classmethod
    def of(cls, settings: DataSettings) -> Self | None:
        """Return what the settings say, None where a sample has one label.

        DataError for a map to a label that the run does not have.
        """
        if settings.task != MultiLabel.kind:
            return None
        names = class_names(settings.classes)
        meaning = parse_label_map(settings.label_map)
        for name, label in meaning.items():
            if label and names and label not in names:
                which = f"label-map = {settings.label_map!r}: {name!r} stands for {label!r}"
                raise DataError(f"{which}, which is none of classes = {settings.classes!r}")
        return cls(names, meaning, settings.uncertain)

    # -- of a table
    def in_table(
        self, columns: Mapping[str, Sequence[Any]], where: str
    ) -> tuple[dict[str, Any], set[str]]:
        """Return the arrays ``labels`` and ``classes``, and the columns that are no inputs."""
        for name in JOINED:
            if name in columns:
                return {"labels": columns[name]}, {name}
        if not self.names:
            cure = "name the columns of labels in classes, or have one column labels (a|b)"
            raise DataError(f"{where}: classes = '': {cure}; its columns: {first_of(columns)}")
        for name in self.meaning:
            if name not in columns:
                has = f"the data have no column {name!r}; their columns: {first_of(columns)}"
                raise DataError(f"label-map: {where}: {has}")
        own = [name for name in columns if self.meaning.get(name, name) in self.names]
        if not own:
            none = f"classes = {as_list(self.names)!r} names no column"
            raise DataError(f"{where}: {none}; its columns: {first_of(columns)}")
        values = np.empty((len(columns[own[0]]), len(own)), dtype=object)
        for position, name in enumerate(own):
            values[:, position] = list(columns[name])
        return {"labels": values, "classes": own}, {*own, *self.meaning}

    # -- of arrays
    def read(self, values: Any, own: Any, where: str, place: Place) -> ReadLabels:
        """Read a matrix whose columns are the labels ``own``, or the names that hold of a sample.

        DataError for what is neither.
        """
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        rows = list(values)
        if not rows:
            raise DataError(f"{where}: has no samples")
        if _are_names(rows):
            read = self._joined(rows, where, place)
        else:
            names = tuple(as_array(own, f"{where}: classes").astype(str).tolist())
            read = self._matrix(rows, names, where, place)
        unknown = np.flatnonzero((read.labels == UNLABELLED).all(1))
        if len(unknown):
            many = f"{len(unknown)} of {len(rows)} samples"
            why = f"no label of it is known ({many}); leave such samples out"
            raise DataError(f"{where}: {place(int(unknown[0]))}: {why}")
        return read

    def _matrix(
        self, rows: Sequence[Any], own: Sequence[str], where: str, place: Place
    ) -> ReadLabels:
        own = own or self.names
        widths = {np.size(row) for row in rows}
        if not own:
            cure = "name them: classes, in the order of the columns"
            raise DataError(f"{where}: the labels [samples, labels] have no names; {cure}")
        if len(set(own)) < len(own):
            raise DataError(f"{where}: classes = {list(own)!r}: a name stands there twice")
        if widths != {len(own)}:
            shape = f"of {first_of(map(str, sorted(widths)))} labels a sample"
            raise DataError(f"{where}: labels {shape}, and {len(own)} names: {first_of(own)}")
        given: NDArray[Any] = np.array([list(np.ravel(row)) for row in rows], dtype=object)

        meanings = [self.meaning.get(name, name) for name in own]
        names = self.names or tuple(dict.fromkeys(filter(None, meanings)))
        check_class_names(names, f"{where}: the labels {first_of(names)}", "two or more")
        labels = np.full((len(rows), len(names)), UNLABELLED, np.int64)
        left_out = [name for name, label in zip(own, meanings, strict=True) if label not in names]
        for label in names:
            columns = [column for column, meaning in enumerate(meanings) if meaning == label]
            if len(columns) > 1:
                several = ", ".join(repr(own[column]) for column in columns)
                raise DataError(f"{where}: {several} all stand for the label {label!r}")
            for column in columns:
                what = f"label {own[column]!r}"
                read = self._column(given[:, column], what, where, place)
                labels[:, names.index(label)] = read
        if len(left_out) == len(own):
            asked = f"classes = {as_list(names)!r}"
            raise DataError(f"{where}: has no label of {asked}, only {first_of(own)}")
        notes = []
        for name, label in self.meaning.items():
            if label:
                notes.append(f"{where}: the label {name!r} is read as {label!r}")
        if left_out:
            notes.append(f"{where}: left out the labels {first_of(left_out)}")
        unknown = [name for name in names if name not in meanings]
        if unknown:
            notes.append(f"{where}: lacks the labels {first_of(unknown)}: they count as not known")
        return ReadLabels(labels, names, tuple(notes))

    def _column(self, values: NDArray[Any], what: str, where: str, place: Place) -> Ints:
        """One label of all samples."""
        is_gap_N = np.array([_is_gap(value) for value in values])
        numbers_N = np.array(
            [0.0 if gap else number(v) for v, gap in zip(values, is_gap_N, strict=True)]
        )
        is_uncertain_N = numbers_N == UNCERTAIN
        if self.uncertain != "refuse":
            numbers_N[is_uncertain_N] = 0 if self.uncertain == "missing" else float(self.uncertain)
        wrong = np.flatnonzero(~np.isin(numbers_N, (0, 1)))
        if len(wrong):
            row = int(wrong[0])
            value = printable(repr(values[row]), 40)
            why = f"{value} is neither 1 nor 0, nor a gap ({len(wrong)} such values)"
            if is_uncertain_N.any():
                why += "; set uncertain where -1 means that it is not certain"
            raise DataError(f"{where}: {place(row)}, {what}: {why}")
        if self.uncertain == "missing":
            is_gap_N |= is_uncertain_N
        return np.where(is_gap_N, UNLABELLED, numbers_N).astype(np.int64)

    def _joined(self, rows: Sequence[Any], where: str, place: Place) -> ReadLabels:
        held: list[set[str]] = []
        for row, value in enumerate(rows):
            parts = value.split(JOINT) if isinstance(value, str) else list(value)
            given = {str(part).strip() for part in parts}
            is_none = {name.lower() for name in given} == {NO_FINDING}
            if isinstance(value, str) and any(name.lower() in GAPS for name in given):
                cure = "write 'No Finding' where none of the labels holds"
                raise DataError(f"{where}: {place(row)} has the labels {value!r}; {cure}")
            names = set() if is_none and not self.names_a_label(given) else given
            held.append({self.meaning.get(name, name) for name in names} - {""})

        found: set[str] = set().union(*held)
        labels_of_run: tuple[str, ...] = self.names or tuple(sorted(found))
        check_class_names(
            labels_of_run, f"{where}: the labels {first_of(labels_of_run)}", "two or more"
        )
        foreign = sorted(found - {*labels_of_run})
        if foreign:
            row = next(row for row, labels in enumerate(held) if foreign[0] in labels)
            which = f"{place(row)} has the label '{printable(foreign[0], 40)}'"
            cure = f"name it there, or in label-map: '{printable(foreign[0], 40)}=' leaves it out"
            raise DataError(f"{where}: {which}, which is none of {first_of(labels_of_run)}; {cure}")
        labels = np.full((len(rows), len(labels_of_run)), UNLABELLED, np.int64)
        for column, name in enumerate(labels_of_run):
            if name in found:
                labels[:, column] = [name in of_sample for of_sample in held]
        absent = [name for name in labels_of_run if name not in found]
        missing = f"{where}: no sample has the labels {first_of(absent)}: they count as not known"
        return ReadLabels(labels, labels_of_run, (missing,) if absent else ())

    def names_a_label(self, given: set[str]) -> bool:
        """Whether one of these names is a label of the run, as "No Finding" may be."""
        return bool(given & {*self.names, *self.meaning})


def parse_label_map(text: str) -> dict[str, str]:
    """Read ``Effusion=Pleural Effusion, Mass=Nodule``; DataError for another form."""
    meaning: dict[str, str] = {}
    for part in names_in(text):
        name, sign, label = (piece.strip() for piece in part.partition("="))
        if not sign or not name:
            wanted = f"{part!r} must be NAME=LABEL, the name in the data first"
            raise DataError(f"label-map = {text!r}: {wanted}")
        if name in meaning:
            raise DataError(f"label-map = {text!r}: {name!r} stands there twice")
        meaning[name] = label
    return meaning


def _are_names(rows: Sequence[Any]) -> bool:
    """Whether each row is a text, or a list of texts, and not of numbers."""
    if all(isinstance(row, str) for row in rows):
        return True
    if any(isinstance(row, str) or not np.iterable(row) for row in rows):
        return False
    parts = [part for row in rows for part in row]
    return all(isinstance(part, str) and not _is_number_or_gap(part) for part in parts)


def _is_number_or_gap(text: str) -> bool:
    return _is_gap(text) or number(text) == number(text)


def _is_gap(value: Any) -> bool:
    return value is None or value != value or str(value).strip().lower() in GAPS
