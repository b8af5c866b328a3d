"""Several labels a sample, as their owner gives them: a number for each, or the names that hold.

Both become int64 [N, L]: 1 for a label that holds, 0 for one that does not, -1 for one that nobody
has looked for. Names decide, not their order: a label of the run that the data do not name is
unknown for all samples. What else is in the data is named, with its place and a cure.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from protofl_common.basics.text import first_of, printable
from protofl_common.config.lists import as_list, as_setting, names_in
from protofl_common.config.sections import DataSettings
from protofl_common.data.door import (
    JOINTS,
    check_class_names,
    class_names,
    is_gap,
    joins_labels,
    letters_of,
    number,
    say,
    spelt_twice,
)
from protofl_common.data.raw import DataError, Ints, Place
from protofl_common.data.table import ANNOTATION_COLUMNS, name_and_categories
from protofl_common.tasks import UNLABELLED, MultiLabel

JOINT = "|"  # between the names of the labels of a sample
NO_FINDING = "no finding"  # stands in the place of names where no label holds, in any letters
JOINED = ("labels", "label")  # columns of such names
UNCERTAIN = -1.0  # the value of a label that may hold or not, as in CheXpert
MOST_LEFT_OUT = 30  # names in the cure of an error


ReadLabels = tuple[Ints, tuple[str, ...]]
"""Labels [N, L], and their names."""


@dataclass(frozen=True)
class SeveralLabels:
    """How the labels of a data set are to be read."""

    names: tuple[str, ...] = ()
    """The labels of the run, in its order (setting ``classes``); () for those that occur."""
    meaning: Mapping[str, str] = field(default_factory=dict)
    """A name in the data -> the label that it stands for, "" for none (setting ``label-map``)."""
    uncertain: str = "refuse"
    """What -1 stands for: ``refuse``, ``missing``, ``0`` or ``1``."""

    @classmethod
    def of(cls, settings: DataSettings) -> Self | None:
        """Return how labels are to be read by the settings; None where a sample has one label.

        DataError if ``label-map`` names a label that is none of ``classes``.
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
        """Return a table's labels for `read`, and the names of the columns that have them.

        One column (`JOINED`) may join the names of each sample's labels, ``a|b``: it is returned as
        ``labels``. Otherwise each label has a column: ``labels`` [samples, labels] has the columns'
        values, and ``classes`` their names. DataError if the table has no such columns, or lacks a
        column of ``label-map``.
        """
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
        of_labels = [name for name in columns if self.meaning.get(name, name) in self.names]
        for name in of_labels:
            if name in ANNOTATION_COLUMNS:
                both = f"column {name!r} would be a label, and the {name} of each sample"
                setting = f'label-map="NEW NAME={self.meaning.get(name, name)}"'
                raise DataError(f"{where}: {both}; rename it, and set {setting}")
        if not of_labels:
            none = f"classes = {as_list(self.names)!r} names no column"
            raise DataError(f"{where}: {none}; its columns: {first_of(columns)}")
        values = np.empty((len(columns[of_labels[0]]), len(of_labels)), dtype=object)
        for position, name in enumerate(of_labels):
            values[:, position] = list(columns[name])
        return {"labels": values, "classes": of_labels}, set(of_labels)

    def check_inputs(self, columns: Iterable[str], labels: Iterable[str], where: str) -> None:
        """Raise DataError for a column of inputs that has the name of one of the ``labels``.

        It would give the label away. Its name may be written otherwise, or be one that
        ``label-map`` reads. ``columns`` are as a model's card names them.
        """
        names = {letters_of(name): name for name in (*self.meaning, *labels)}
        for column_of_card in columns:
            column, _ = name_and_categories(column_of_card)
            name = names.get(letters_of(column))
            if name is None:
                continue
            label = self.meaning.get(name, name)  # "" if ``label-map`` leaves it out
            cure = "drop it"
            if label and column != name:
                cure += f', or set label-map="{column}={label}" if it has the label'
            would = f"column {column!r} would be an input, and is called as the label {name!r}"
            raise DataError(f"{where}: {would}; {cure}")

    def check_left_out(
        self, columns: Iterable[str], of_labels: Iterable[str] | None, where: str
    ) -> None:
        """Raise DataError for a column that is left out, and is called as a label that is lacking.

        The label would count as not known. ``of_labels`` are the columns of labels; None if one
        column joins the names of each sample's labels.
        """
        if of_labels is None:
            return
        known = {self.meaning.get(name, name) for name in of_labels}
        lacking = {letters_of(label): label for label in self.names if label not in known}
        for column in columns:
            label = lacking.get(letters_of(column))
            if label is not None and column not in self.meaning:
                setting = f'set label-map="{column}={label}" if it has the label'
                cure = f'{setting}, and otherwise label-map="{column}="'
                would = f"{column!r} would be left out, and is called as the label {label!r}"
                raise DataError(f"{where}: {would}; {cure}")

    # -- of arrays
    def read(self, values: Any, columns: tuple[str, ...], where: str, place: Place) -> ReadLabels:
        """Read a matrix [samples, labels], or the names of the labels that each sample has.

        ``columns`` are the names of the matrix's columns, if they have any. ``where`` names the
        data in errors, ``place`` a sample in them. DataError for labels of another form, and for a
        sample of which no label is known.
        """
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        rows = list(values)
        if not rows:
            raise DataError(f"{where}: has no samples")
        if _are_names(rows):
            labels, names = self._from_names(rows, where, place)
        else:
            labels, names = self._from_matrix(rows, columns, where, place)
        unknown = np.flatnonzero((labels == UNLABELLED).all(1))
        if len(unknown):
            many = f"{len(unknown)} of {len(rows)} samples"
            why = f"no label of it is known ({many}); leave such samples out"
            raise DataError(f"{where}: {place(int(unknown[0]))}: {why}")
        return labels, names

    def _from_matrix(
        self, rows: Sequence[Any], columns: Sequence[str], where: str, place: Place
    ) -> ReadLabels:
        """Read rows with a number for each label; ``columns`` are the labels' names in the data.

        Without names in the data the columns are the run's labels, in its order. A column that
        stands for none of these is left out, and a label of the run without a column is unknown
        for all samples: the data's owner is told of both.
        """
        columns = columns or self.names
        values = self._checked_matrix(rows, columns, where)
        meanings = [self.meaning.get(name, name) for name in columns]
        meant = dict.fromkeys(filter(None, meanings))  # each label once, in order; "" is none
        names = self.names or tuple(meant)
        check_class_names(names, f"{where}: the labels {first_of(names)}", "two or more")
        labels = np.full((len(rows), len(names)), UNLABELLED, np.int64)
        for position, label in enumerate(names):
            places = [column for column, meaning in enumerate(meanings) if meaning == label]
            if len(places) > 1:
                several = ", ".join(repr(columns[column]) for column in places)
                raise DataError(f"{where}: {several} all stand for the label {label!r}")
            for column in places:  # the only one, or none
                what = f"label {columns[column]!r}"
                labels[:, position] = self._column(values[:, column], what, where, place)

        left_out = [name for name in columns if self.meaning.get(name, name) not in names]
        if len(left_out) == len(columns):
            asked = f"classes = {as_list(names)!r}"
            raise DataError(f"{where}: has no label of {asked}, only {first_of(columns)}")
        for name, label in self.meaning.items():
            if label:
                say(f"{where}: the label {name!r} is read as {label!r}")
        if left_out:
            self.check_left_out(left_out, columns, where)
            say(f"{where}: left out the labels {first_of(left_out)}")
        unknown = [name for name in names if name not in meanings]
        if unknown:
            say(f"{where}: lacks the labels {first_of(unknown)}: they count as not known")
        return labels, names

    @staticmethod
    def _checked_matrix(rows: Sequence[Any], columns: Sequence[str], where: str) -> NDArray[Any]:
        """Return the rows as an array of objects [samples, labels].

        ``columns`` are the labels' names. DataError if there are none, if two are equal, or if a
        row has not a value for each.
        """
        widths = {np.size(row) for row in rows}  # numbers of labels: they may differ by row
        if not columns:
            cure = "name them: classes, in the order of the columns"
            raise DataError(f"{where}: the labels [samples, labels] have no names; {cure}")
        if len(set(columns)) < len(columns):
            raise DataError(f"{where}: classes = {list(columns)!r}: a name stands there twice")
        if widths != {len(columns)}:
            shape = f"of {first_of(map(str, sorted(widths)))} labels a sample"
            names = f"{len(columns)} names: {first_of(columns)}"
            raise DataError(f"{where}: labels {shape}, and {names}")
        return np.array([list(np.ravel(row)) for row in rows], dtype=object)

    def _column(self, values: NDArray[Any], what: str, where: str, place: Place) -> Ints:
        """Read one label of all samples: 1, 0, or `UNLABELLED` for a gap, [N].

        `UNCERTAIN` is read as the setting ``uncertain`` says: refused, a gap, 0 or 1. ``what``
        names the label. DataError for any other value.
        """
        is_gap_N = np.array([is_gap(value) for value in values])
        numbers_N = np.array([number(value) for value in values])
        numbers_N[is_gap_N] = 0  # they become `UNLABELLED` at the end
        is_uncertain_N = numbers_N == UNCERTAIN
        if self.uncertain == "missing":
            numbers_N[is_uncertain_N] = 0
            is_gap_N |= is_uncertain_N
        elif self.uncertain != "refuse":
            numbers_N[is_uncertain_N] = float(self.uncertain)
        wrong = np.flatnonzero(~np.isin(numbers_N, (0, 1)))
        if len(wrong):
            row = int(wrong[0])
            first = values[row]
            if isinstance(first, np.generic):
                first = first.item()  # NumPy would name its type
            value = printable(repr(first), 40)
            why = f"{value} is neither 1 nor 0, nor a gap ({len(wrong)} such values)"
            if is_uncertain_N.any():
                why += "; set uncertain where -1 means that it is not certain"
            raise DataError(f"{where}: {place(row)}, {what}: {why}")
        return np.where(is_gap_N, UNLABELLED, numbers_N).astype(np.int64)

    def _from_names(self, rows: Sequence[Any], where: str, place: Place) -> ReadLabels:
        """Read rows that name the labels of a sample: texts ``a|b``, or lists of names.

        A label that some sample has does not hold for those that do not name it. One that no
        sample has is unknown for all, as nobody may have looked for it: its owner is told.
        DataError for a name that is no label of the run.
        """
        held: list[set[str]] = []  # the labels of each sample
        for row, value in enumerate(rows):
            names_of_sample = _names_in(value)
            if any(map(is_gap, names_of_sample)):
                cure = "write 'No Finding' where none of the labels holds"
                raise DataError(f"{where}: {place(row)} has the labels {value!r}; {cure}")
            labels_of_sample = self._labels_named(names_of_sample)
            if labels_of_sample is None:
                raise DataError(f"{where}: {place(row)} has {value!r}: a finding, and none")
            held.append(labels_of_sample)

        named: set[str] = set().union(*held)  # labels that some sample has
        names: tuple[str, ...] = self.names
        if not names:
            _check_spellings(named, where)
            names = tuple(sorted(named))
        check_class_names(names, f"{where}: the labels {first_of(names)}", "two or more")
        foreign = sorted(named - {*names})
        if foreign:
            first = foreign[0]
            row = next(row for row, of_sample in enumerate(held) if first in of_sample)
            shown = printable(first, 40)
            which = f"{place(row)} has the label '{shown}', which is none of {first_of(names)}"
            raise DataError(f"{where}: {which}; {_cure_of_foreign(foreign, names)}")
        if not named:
            none = f"no sample has a label of {first_of(names)}, so that none of them is known"
            cure = "a column for each label that was looked for, with 0, says that it does not hold"
            raise DataError(f"{where}: {none}; {cure}")
        labels = np.full((len(rows), len(names)), UNLABELLED, np.int64)
        absent = []
        for column, name in enumerate(names):
            if name in named:  # then 0 for samples that do not name it
                labels[:, column] = [name in of_sample for of_sample in held]
            else:
                absent.append(name)
        if absent:
            missing = f"no sample has the labels {first_of(absent)}"
            say(f"{where}: {missing}: they count as not known")
        return labels, names

    def _labels_named(self, names: set[str]) -> set[str] | None:
        """Return the labels that a sample's names stand for, by ``label-map``.

        "No Finding" stands for no label at all, unless the run or the map has one of that name;
        None if there is another name beside it.
        """
        foreign = names.difference(self.names, self.meaning)
        says_none = any(name.lower() == NO_FINDING for name in foreign)
        if says_none:
            return set() if len(names) == 1 else None
        return {self.meaning.get(name, name) for name in names} - {""}


def parse_label_map(text: str) -> dict[str, str]:
    """Read the setting ``label-map``: name in the data -> label of the run, "" to leave it out.

    It looks like ``Effusion=Pleural Effusion, Mass=Nodule, Fracture=``. DataError for another form,
    or a name that stands there twice.
    """
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


def _check_spellings(named: set[str], where: str) -> None:
    """Raise DataError for names in the data that join others, or are spellings of one label.

    Where the run names its labels, such a name is none of them (`_cure_of_foreign`).
    """
    names = sorted(named)
    several_spellings = spelt_twice(names)
    for name in names:
        if joins_labels(name, named):
            raise DataError(f"{where}: {name!r} joins other labels; write '{JOINT}' between them")
        if name in several_spellings:
            raise DataError(f"{where}: {name!r} is also written in other letters; write it alike")


def _cure_of_foreign(foreign: Sequence[str], names: Sequence[str]) -> str:
    """Say what to do about names in the data that are none of the ``names`` of the run.

    A name that is another spelling of one of the run is read as that: if it were left out, its
    samples would count as lacking the label.
    """
    for name in foreign:
        parts = {part.strip() for part in re.split(f"[{JOINTS}]", name)}
        if len(parts) > 1 and not parts.isdisjoint(names):
            return f"separate the names of several labels by {JOINT}"
    label_by_letters = {letters_of(name): name for name in names}
    meant = {name: label_by_letters.get(letters_of(name), "") for name in foreign}
    wanted = [f"{name}={label}" for name, label in meant.items()][:MOST_LEFT_OUT]
    setting = as_setting("label-map", [printable(pair, 80) for pair in wanted])
    if not setting or any("=" in name for name in foreign):
        return "name it there, or rename it in the data"
    what = "leaves out all that are not"
    if any(meant.values()):
        what = "reads those of other spellings, and leaves out all others"
    return f"name it there; {setting} {what}"


def _names_in(value: Any) -> set[str]:
    """Return the names in a text that joins them (``a|b``), or in a list; {""} for a gap."""
    if _is_missing(value):
        return {""}
    parts = value.split(JOINT) if isinstance(value, str) else value
    return {str(part).strip() for part in parts}


def _are_names(rows: Sequence[Any]) -> bool:
    """Return whether each row is a text, or a list of texts that are no numbers and no gaps.

    Rows without any value do not count.
    """
    rows = [row for row in rows if not _is_missing(row)]
    if all(isinstance(row, str) for row in rows):
        return True
    if any(isinstance(row, str) or not np.iterable(row) for row in rows):
        return False
    for part in chain.from_iterable(rows):
        is_name = isinstance(part, str) and not is_gap(part) and math.isnan(number(part))
        if not is_name:
            return False
    return True


def _is_missing(row: Any) -> bool:
    """Return whether a row is None or NaN, in the place of a text or a list."""
    return row is None or (isinstance(row, float) and math.isnan(row))
