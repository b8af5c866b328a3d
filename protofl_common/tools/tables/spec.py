"""A table as its YAML file says it: rows × columns × seeds, each with settings above a recipe.

    title: what stands above it
    source: paper and table
    note: a line or more on how ours differs from the paper's (optional)
    recipe: the name of a recipe (optional); a column or a row may name another
    seeds: [1, 2, 3]
    figure: {when: best, what: prototype}          # see `metrics`; a column or a row may say more
    settings: {rounds: 100}                        # for all runs (optional)
    columns:
      practical: {recipe: …, settings: {…}, figure: {…}, clients: 50}      # each part optional
    rows:
      FedAvg:                                                              # the table's settings
      FedTGP: {settings: {algo: fedtgp}, paper: [97.58 ± 0.05]}            # the paper's numbers, by column
      FedGen: {paper: [97.35 ± 0.02]}                                      # only the paper's: nothing runs
      gain: {minus: [FedTGP, FedProto], paper: [0.12]}                     # difference of two rows, by seed
      FedProx: {settings: {algo: fedprox}, grid: {fedprox.mu: [0.01, 0.1]}}  # a row for each combination of values
    against: FedProto                              # the others' differences from this row, paired over seeds (optional)
    trials: 12                                     # what --search tries for each cell, on validation data,
    trial-seeds: [1001]                            #   with seeds that are none of `seeds`;
    search: {lr: {log: [0.001, 0.1]}, momentum: [0, 0.9]}   # over what; columns and rows may say more. {range: [1, 5]}

What is nearer to the run wins: recipe, settings of the table, of the column, of the row, of the command line, seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from protofl_common.config.options import Scalar, SettingsError, unknown_keys
from protofl_common.experiment.settings import known_keys

COLUMN_KEYS = ("recipe", "settings", "figure", "clients", "search")
ROW_KEYS = (*COLUMN_KEYS, "paper", "minus", "grid")
NAMED_PARTS = ("settings", "figure", "search", "grid")
OF_TABLE = ("title", "source", "note", "recipe", "seeds", "figure", "settings", "columns", "rows")
TABLE_KEYS = (*OF_TABLE, "against", "search", "trials", "trial-seeds")
TRIAL_SEEDS = (1001,)
RANGES = ("log", "range")


@dataclass(frozen=True)
class Part:
    """A column, or what a row says of its runs."""

    recipe: str = ""
    settings: dict[str, Scalar] = field(default_factory=dict)
    figure: dict[str, Any] = field(default_factory=dict)
    clients: int | None = None
    search: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row; ``part`` is None where nothing runs."""

    part: Part | None
    paper: dict[str, str]
    minus: tuple[str, str] | None = None


@dataclass(frozen=True)
class TableFile:
    """A whole table."""

    name: str
    title: str
    source: str
    note: str
    base: Part
    seeds: tuple[int, ...]
    columns: dict[str, Part]
    rows: dict[str, Row]
    against: str = ""
    trials: int = 0
    trial_seeds: tuple[int, ...] = TRIAL_SEEDS


class _Loader(yaml.SafeLoader):
    """Takes 1e-3 for a number, as JSON, TOML and YAML 1.2 do."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


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
    problems = _wrong_shapes(content) or _problems(content)
    if problems:
        raise SettingsError("\n".join(f"{path.name}: {problem}" for problem in problems))
    content["rows"] = dict(_spread(content["rows"]))
    columns = {str(name): _part(said or {}) for name, said in content["columns"].items()}
    return TableFile(
        name=path.stem,
        title=str(content["title"]),
        source=str(content.get("source", "")),
        note=str(content.get("note", "")).strip(),
        base=_part(content),
        seeds=tuple(content.get("seeds", (1,))),
        columns=columns,
        rows={str(name): _row(said, list(columns)) for name, said in content["rows"].items()},
        against=str(content.get("against", "")),
        trials=content.get("trials", 0),
        trial_seeds=tuple(content.get("trial-seeds", TRIAL_SEEDS)),
    )


def _spread(rows: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A row for each combination of the values in its ``grid``."""
    for name, said in rows.items():
        grid = (said or {}).get("grid", {})
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            more = {"settings": {**said.get("settings", {}), **chosen}} if grid else {}
            yield ", ".join([str(name), *(f"{key} {value}" for key, value in chosen.items())]), {**(said or {}), **more}


def _part(said: dict[str, Any]) -> Part:
    named = {name: said.get(name, {}) for name in ("settings", "figure", "search")}
    return Part(recipe=str(said.get("recipe", "")), clients=said.get("clients"), **named)


def _row(said: dict[str, Any], columns: list[str]) -> Row:
    numbers = said.get("paper", [])
    paper = numbers if isinstance(numbers, dict) else dict(zip(columns, numbers, strict=False))
    texts = {str(column): str(number) for column, number in paper.items() if number is not None}
    minus = said.get("minus")
    return Row(_part(said) if _runs(said) else None, texts, tuple(minus) if minus else None)


def _runs(said: dict[str, Any]) -> bool:
    """Return whether there is more in a row than numbers; one with nothing in it has the table's settings."""
    return said.get("minus") is None and ("paper" not in said or any(key in said for key in COLUMN_KEYS))


def _wrong_shapes(content: dict[str, Any]) -> list[str]:
    """A line for each thing that is no list or no dictionary and must be one."""
    problems = []
    for kind in ("columns", "rows"):
        members = content.get(kind) or {}
        if not isinstance(members, dict):
            problems.append(f"{kind} = {members!r}: must be a name and what it holds for each, NAME: {{…}}")
            continue
        for name, said in members.items():
            if said is not None and not isinstance(said, dict):
                problems.append(f"{kind[:-1]} {name} = {said!r}: must be key: value pairs")
            elif said and not isinstance(said.get("paper", []), list | dict):
                problems.append(f"row {name}: paper = {said['paper']!r}: must be a number for each column, [1.0, …]")
    return problems


def _problems(content: dict[str, Any]) -> list[str]:
    problems = _unknown("", content, TABLE_KEYS)
    problems += [f"{key}: missing" for key in ("title", "rows") if not content.get(key)]
    seeds = content.get("seeds", [1])
    if not _whole_numbers(seeds):
        problems.append(f"seeds = {seeds!r}: must be a list of whole numbers, at least 0")
        seeds = []
    trials, trial_seeds = content.get("trials", 1), content.get("trial-seeds", list(TRIAL_SEEDS))
    if not _whole_numbers([trials]) or trials < 1:
        problems.append(f"trials = {trials!r}: must be a whole number, at least 1")
    if not _whole_numbers(trial_seeds) or set(trial_seeds) & set(seeds):
        problems.append(
            f"trial-seeds = {trial_seeds!r}: must be a list of whole numbers, none of them one of the seeds"
        )
    rows = content.get("rows") or {}
    for kind, members, legal in (("column", content["columns"], COLUMN_KEYS), ("row", rows, ROW_KEYS)):
        for name, said in members.items():
            problems += _unknown(f"{kind} {name}: ", said or {}, legal)
    for name, said in rows.items():
        problems += _problems_of_row(str(name), said or {}, content)
    if any(
        "seed" in ((part or {}).get("settings") or ())
        for part in (content, *content["columns"].values(), *rows.values())
    ):
        problems.append("settings: seed: must not be there; list them under seeds")
    against, names = content.get("against"), [] if problems else [name for name, _ in _spread(rows)]
    if against and names and against not in names:
        problems.append(f"against = {against!r}: must be one of {', '.join(names)}")
    return problems


def _problems_of_row(name: str, said: dict[str, Any], content: dict[str, Any]) -> list[str]:
    problems, columns, numbers = [], content["columns"], said.get("paper", [])
    if isinstance(numbers, list) and len(numbers) > len(columns):
        problems.append(f"row {name}: paper has {len(numbers)} numbers for {len(columns)} columns")
    if isinstance(numbers, dict):
        problems += [f"row {name}: paper: no column {column!r}" for column in numbers if column not in columns]
    minus = said.get("minus")
    if minus is not None:
        others = {row: other for row, other in content["rows"].items() if row != name and _runs(other or {})}
        there = [row for row, _ in _spread(others)]
        if not isinstance(minus, list) or len(minus) != 2 or any(row not in there for row in minus):
            problems.append(f"row {name}: minus = {minus!r}: must be two of {', '.join(map(str, there))}")
    return problems


def _unknown(where: str, said: dict[str, Any], legal: tuple[str, ...]) -> list[str]:
    problems = [f"{where}{line}" for line in unknown_keys(said, legal)]
    for part in NAMED_PARTS:
        if not isinstance(said.get(part, {}), dict):
            problems.append(f"{where}{part} = {said[part]!r}: must be key: value pairs")
        elif part != "figure":
            problems += [f"{where}{part}: {line}" for line in unknown_keys(said.get(part, {}), known_keys())]
    problems += [f"{where}{problem}" for problem in _problems_of_values(said)]
    clients = said.get("clients", 1)
    if not _whole_numbers([clients]) or clients < 1:
        problems.append(f"{where}clients = {clients!r}: must be a whole number, at least 1")
    return problems


def _problems_of_values(said: dict[str, Any]) -> Iterator[str]:
    """Read ``grid`` and ``search``."""
    for part in ("grid", "search"):
        values = said.get(part, {})
        for key, among in values.items() if isinstance(values, dict) else ():
            if not (isinstance(among, list) and among) and not (part == "search" and _is_range(among)):
                ranges = ", {log: [LOW, HIGH]} or {range: [LOW, HIGH]}" * (part == "search")
                yield f"{part}: {key} = {among!r}: must be a list of values{ranges}"


def _is_range(said: Any) -> bool:
    if not isinstance(said, dict) or list(said) not in ([name] for name in RANGES):
        return False
    ((name, ends),) = said.items()
    numbers = isinstance(ends, list) and [type(end) in (int, float) for end in ends] == [True, True]
    return numbers and ends[0] < ends[1] and (name == "range" or ends[0] > 0)


def _whole_numbers(values: Any) -> bool:
    numbers = isinstance(values, list) and all(isinstance(value, int) and value >= 0 for value in values)
    return numbers and len(values) > 0
