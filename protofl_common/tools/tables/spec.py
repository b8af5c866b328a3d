"""A table as its YAML file says it: rows × columns × seeds, each with settings above a recipe (docs/tables.md)."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from protofl_common.config.options import Scalar, SettingsError, keys_of, unknown_keys
from protofl_common.experiment.settings import known_keys

TRIAL_SEEDS = (1001,)


@dataclass(frozen=True)
class Part:
    recipe: str = ""
    settings: dict[str, Scalar] = field(default_factory=dict)
    figure: dict[str, Any] = field(default_factory=dict)
    clients: int | None = None
    search: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row(Part):
    paper: dict[str, str] = field(default_factory=dict)
    runs: bool = True  # False: it is numbers of a paper, and no more


@dataclass(frozen=True)
class TableFile(Part):
    name: str = ""
    title: str = ""
    source: str = ""
    note: str = ""
    seeds: Sequence[int] = (1,)
    columns: dict[str, Part] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    against: str = ""
    trials: int = 0
    trial_seeds: Sequence[int] = TRIAL_SEEDS


COLUMN_KEYS = keys_of(Part)
ROW_KEYS = [*COLUMN_KEYS, "paper", "grid"]
TABLE_KEYS = [key for key in keys_of(TableFile) if key not in ("name", "clients")]


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _are_seeds(value: Any) -> bool:
    return _is_list(value) and all(isinstance(seed, int) and seed >= 0 for seed in value)


def _is_space(value: Any) -> bool:
    if not isinstance(value, dict) or list(value) not in (["log"], ["range"]):
        return _is_list(value)
    ((name, ends),) = value.items()
    numbers = isinstance(ends, list) and [type(end) in (int, float) for end in ends] == [True, True]
    return numbers and ends[0] < ends[1] and (name == "range" or ends[0] > 0)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {  # key -> whether a value is right, and what it must be
    **dict.fromkeys(("title", "source", "note", "recipe", "against"), (_is(str), "text")),
    **dict.fromkeys(("settings", "figure", "search", "grid"), (_is(dict), "key: value pairs")),
    **dict.fromkeys(("columns", "rows"), (_is(dict), "a name and what it holds for each, NAME: {…}")),
    **dict.fromkeys(("seeds", "trial-seeds"), (_are_seeds, "a list of whole numbers, at least 0")),
    **dict.fromkeys(("clients", "trials"), (lambda n: isinstance(n, int) and n >= 1, "a whole number, at least 1")),
    "paper": (lambda value: isinstance(value, list | dict), "a number for each column, [1.0, …]"),
}
AMONG: dict[str, tuple[Callable[[Any], bool], str]] = {  # the same of each setting in it
    "grid": (_is_list, "a list of values"),
    "search": (_is_space, "a list of values, {log: [LOW, HIGH]} or {range: [LOW, HIGH]}"),
}


class _Loader(yaml.SafeLoader):
    """Takes 1e-3 for a number, as JSON, TOML and YAML 1.2 do; refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def read_table(path: Path) -> TableFile:
    """Read and check a table; SettingsError with a line for each thing that is wrong with it."""
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
    content = {key: value for key, value in content.items() if value is not None}
    problems = list(_wrong_shapes(content)) or list(_problems(content))
    if problems:
        raise SettingsError("\n".join(f"{path.name}: {problem}" for problem in problems))
    columns = {str(name): Part(**part or {}) for name, part in content["columns"].items()}
    rows = {name: _row(row, list(columns)) for name, row in _spread(content["rows"])}
    fields = {key.replace("-", "_"): value for key, value in content.items()}
    note = content.get("note", "").strip()
    return TableFile(**fields | {"name": path.stem, "note": note, "columns": columns, "rows": rows})


def _spread(rows: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, row in rows.items():
        content = row or {}
        for values in product(*content.get("grid", {}).values()):
            chosen = dict(zip(content.get("grid", {}), values, strict=True))
            more = {"settings": {**content.get("settings", {}), **chosen}} if chosen else {}
            yield ", ".join([str(name), *(f"{key} {value}" for key, value in chosen.items())]), {**content, **more}


def _row(content: dict[str, Any], columns: list[str]) -> Row:
    numbers = content.get("paper", [])
    paper = numbers if isinstance(numbers, dict) else dict(zip(columns, numbers, strict=False))
    texts = {str(column): str(number) for column, number in paper.items() if number is not None}
    part = {key: content[key] for key in COLUMN_KEYS if key in content}
    return Row(**part, paper=texts, runs="paper" not in content or bool(part))


def _wrong_shapes(content: dict[str, Any]) -> Iterator[str]:
    """A line for each key that is unknown, and for each value that is not what `SHAPES` wants."""
    parts: dict[str, tuple[dict[str, Any], list[str]]] = {"": (content, TABLE_KEYS)}
    for kind, legal in (("column", COLUMN_KEYS), ("row", ROW_KEYS)):
        members = content.get(f"{kind}s", {})
        for name, part in members.items() if isinstance(members, dict) else ():
            if not isinstance(part, dict | None):
                yield f"{kind} {name} = {part!r}: must be key: value pairs"
            parts[f"{kind} {name}: "] = (part if isinstance(part, dict) else {}, legal)
    for where, (part, legal) in parts.items():
        yield from (f"{where}{line}" for line in unknown_keys(part, legal))
        for key, value in part.items():
            is_right, wanted = SHAPES.get(key, (lambda _: True, ""))
            if not is_right(value):
                yield f"{where}{key} = {value!r}: must be {wanted}"
            elif key in ("settings", "search", "grid"):
                yield from (f"{where}{key}: {line}" for line in unknown_keys(value, known_keys()))
                is_right, wanted = AMONG.get(key, (lambda _: True, ""))
                wrong = {name: among for name, among in value.items() if not is_right(among)}
                yield from (f"{where}{key}: {name} = {among!r}: must be {wanted}" for name, among in wrong.items())


def _problems(content: dict[str, Any]) -> Iterator[str]:
    yield from (f"{key}: missing" for key in ("title", "rows") if not content.get(key))
    columns, rows, seeds = content["columns"], content.get("rows", {}), content.get("seeds", [1])
    if set(trial_seeds := content.get("trial-seeds", list(TRIAL_SEEDS))) & set(seeds):
        yield f"trial-seeds = {trial_seeds!r}: must be a list of whole numbers, none of them one of the seeds"
    if any("seed" in (part or {}).get("settings", {}) for part in (content, *columns.values(), *rows.values())):
        yield "settings: seed: must not be there; list them under seeds"
    for name, row in rows.items():
        numbers = (row or {}).get("paper", [])
        if isinstance(numbers, list) and len(numbers) > len(columns):
            yield f"row {name}: paper has {len(numbers)} numbers for {len(columns)} columns"
        if isinstance(numbers, dict):
            yield from (f"row {name}: paper: no column {column!r}" for column in numbers if column not in columns)
    names = [name for name, _ in _spread(rows)]
    if (against := content.get("against")) and against not in names:
        yield f"against = {against!r}: must be one of {', '.join(names)}"
