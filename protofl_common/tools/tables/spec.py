"""A table as its YAML file says it: rows × columns × seeds, each with settings above a recipe.

docs/tables.md says what a file may hold; pydantic reads it, by the types of the fields here.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from protofl_common.config.options import SettingsError, key_of, keys_of, unknown_keys
from protofl_common.experiment.catalog import is_key_of_package
from protofl_common.experiment.settings import known_keys

TRIAL_SEEDS = (1001,)


def _must_be(wanted: str) -> WrapValidator:
    """Return a validator that replaces all errors about a value by a single "must be ``wanted``".

    Without it pydantic has an error for each wrong part of a list or mapping.
    """

    def validate(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("must_be", "must be {wanted}", {"wanted": wanted}) from None

    return WrapValidator(validate)


def _known(key: str) -> str:
    if key not in known_keys() and not is_key_of_package(key):
        raise PydanticCustomError("unknown_setting", "unknown key")
    return key


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, one of which a trial of a search tries."""

    low: float
    high: float
    is_log: bool  # 0.001 to 0.01 is as likely as 0.01 to 0.1

    def __contains__(self, value: Any) -> bool:
        return self.low <= float(value) <= self.high


Space = list[Any] | Range


def _space(written: Any) -> Space:
    """Read a list of values, {log: [LOW, HIGH]} or {range: [LOW, HIGH]}."""
    match written:
        case [_, *_]:
            return list(written)
        case {"log": [low, high]} | {"range": [low, high]} if len(written) == 1:
            is_log = "log" in written
            are_numbers = {type(low), type(high)} <= {int, float}  # True is no number here
            if are_numbers and low < high and (low > 0 or not is_log):  # 0 has no logarithm
                return Range(low, high, is_log)
    wanted = "must be a list of values, {log: [LOW, HIGH]} or {range: [LOW, HIGH]}"
    raise PydanticCustomError("must_be", wanted)


def _by_column(numbers: Any, file: ValidationInfo) -> dict[str, Any]:
    """Return a paper's numbers by column; columns without a number are left out.

    A table has them by column, or as a list in the order of its columns.
    """
    columns = [str(column) for column in file.context or ()]
    by_column = numbers
    if isinstance(numbers, list) and len(numbers) <= len(columns):
        by_column = dict(zip(columns, numbers, strict=False))  # the list may be shorter
    if not isinstance(by_column, dict) or not set(map(str, by_column)) <= set(columns):
        wanted = "must be a number for each column, [1.0, …], of {columns}"
        raise PydanticCustomError("must_be", wanted, {"columns": ", ".join(columns)})
    return {column: str(number) for column, number in by_column.items() if number is not None}


def _filled(part: Any) -> Any:
    """Return {} for a column or row with nothing behind its name, which YAML reads as None."""
    return {} if part is None else part


Text = Annotated[str, _must_be("text")]
Count = Annotated[int, Field(strict=True, ge=1), _must_be("a whole number, at least 1")]
Seed = Annotated[int, Field(strict=True, ge=0)]
Seeds = Annotated[
    Sequence[Seed], Field(min_length=1), _must_be("a list of whole numbers, at least 0")
]
Name = Annotated[str, BeforeValidator(str)]
SettingName = Annotated[Name, AfterValidator(_known)]
Values = Annotated[list[Any], Field(min_length=1), _must_be("a list of values")]
Searched = Annotated[Any, AfterValidator(_space)]


@dataclass(frozen=True)
class Common:
    """What a table, a column and a row may each say of runs."""

    __pydantic_config__ = ConfigDict(extra="forbid", alias_generator=key_of)

    recipe: Text = ""
    settings: dict[SettingName, Any] = field(default_factory=dict)
    figure: dict[Name, Any] = field(default_factory=dict)
    search: dict[SettingName, Searched] = field(default_factory=dict)


@dataclass(frozen=True)
class Part(Common):
    """A column, or what a row says of its runs."""

    clients: Count | None = None


@dataclass(frozen=True)
class Row(Part):
    paper: Annotated[dict[Name, str], BeforeValidator(_by_column)] = field(default_factory=dict)
    grid: dict[SettingName, Values] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """False for a row of which the file says nothing but numbers of a paper."""
        return not self.paper or self != Row(paper=self.paper)


@dataclass(frozen=True)
class _TableInFile(Common):
    title: Text = ""
    source: Text = ""
    note: Text = ""
    seeds: Seeds = (1,)
    columns: dict[Name, Annotated[Part, BeforeValidator(_filled)]] = field(default_factory=dict)
    rows: dict[Name, Annotated[Row, BeforeValidator(_filled)]] = field(default_factory=dict)
    against: Text = ""
    trials: Count = 0
    trial_seeds: Seeds = TRIAL_SEEDS


@dataclass(frozen=True)
class TableFile(_TableInFile):
    """A table whose rows with a grid are spread."""

    name: str = ""


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as JSON, TOML and YAML 1.2 do; refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a dictionary as SafeLoader does; ConstructorError for a key that stands twice."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"{key!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def read_table(path: Path) -> TableFile:
    """Read and check a table; SettingsError with a line for each thing that is wrong with it."""
    content = _content_of(path)
    try:
        file = TypeAdapter(_TableInFile).validate_python(content, context=content["columns"])
        problems = list(_contradictions(file))
    except ValidationError as error:
        problems = [_line_for(each) for each in error.errors()]
    if problems:
        raise SettingsError("\n".join(f"{path.name}: {problem}" for problem in problems))
    facts = {"name": path.stem, "note": file.note.strip(), "rows": _spread(file.rows)}
    return TableFile(**vars(file) | facts)


def _content_of(path: Path) -> dict[str, Any]:
    """Read a table's YAML, without the keys that have no value.

    SettingsError for a file that cannot be read, and for one that has no mapping of columns.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("columns"), dict):
        raise SettingsError(f"{path}: a table needs title, columns and rows")
    return {key: value for key, value in content.items() if value is not None}


def _spread(rows: dict[str, Row]) -> dict[str, Row]:
    """Return a row for each combination of the values in a row's grid; others as they are."""
    spread = {}
    for name, row in rows.items():
        for values in product(*row.grid.values()):
            chosen = dict(zip(row.grid, values, strict=True))
            names = [name, *(f"{key} {value}" for key, value in chosen.items())]
            spread[", ".join(names)] = replace(row, settings=row.settings | chosen)
    return spread


def _line_for(error: ErrorDetails) -> str:
    """Turn an error of pydantic into a line such as ``row A: grid: lr = 3: must be …``."""
    # the keys that lead to the value; behind a key that is wrong itself pydantic puts "[key]"
    place = [str(part) for part in error["loc"] if part != "[key]"]
    legal_keys = keys_of(_TableInFile)
    if place[0] in ("columns", "rows") and len(place) > 1:
        legal_keys = keys_of(Part if place[0] == "columns" else Row)
        place[:2] = [f"{place[0].removesuffix('s')} {place[1]}"]  # "rows", "A" -> "row A"
    match error["type"]:
        case "unexpected_keyword_argument" | "invalid_key" | "unknown_setting" as kind:
            if kind == "unknown_setting":
                legal_keys = known_keys()
            (problem,) = unknown_keys({place[-1]: ""}, legal_keys)
            return ": ".join([*place[:-1], problem])
        case "dict_type" | "dataclass_type":
            problem = "must be key: value pairs"
        case _:
            problem = error["msg"]
    return f"{': '.join(place)} = {error['input']!r}: {problem}"


def _contradictions(file: _TableInFile) -> Iterator[str]:
    """Yield a line for each thing that a table lacks, and for parts of it that do not fit."""
    if not file.title:
        yield "title: missing"
    if not file.rows:
        yield "rows: missing"
    if set(file.trial_seeds) & set(file.seeds):
        yield (
            f"trial-seeds = {list(file.trial_seeds)!r}: must be a list of whole numbers, none of "
            "them one of the seeds"
        )
    parts: list[Common] = [file, *file.columns.values(), *file.rows.values()]
    if any("seed" in part.settings for part in parts):
        yield "settings: seed: must not be there; list them under seeds"

    names = _spread(file.rows)
    if file.against and file.against not in names:
        yield f"against = {file.against!r}: must be one of {', '.join(names)}"
