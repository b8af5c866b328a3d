"""Typed options: from a flat run configuration to frozen dataclasses, with errors a person can act on.

A `Table` is a frozen dataclass whose fields are made by :func:`option`. Defaults stand in ``[tool.flwr.app.config]`` of
``pyproject.toml``, so every key of a section must be present.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from os.path import expanduser
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_type_hints

Scalar = bool | int | float | str
Config = dict[str, Scalar]  # a flat configuration: of a run, or of its federation
Values = Mapping[str, Scalar]  # one that is only read: of a run, or of a node
Section = TypeVar("Section")
LARGEST = 3.4e38  # finite number: PyTorch computes in float32
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_hints = cache(get_type_hints)
Affects = Literal["result", "data", "name", "machine", "waiting", "display"]
"""What a setting changes: results; samples; name and place of results; where things are; who is waited for; display."""


class SettingsError(ValueError):
    """One or more settings are wrong; the message has one line per setting."""


def option(
    *,
    default: Scalar | None = None,
    choices: Iterable[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    or_zero: bool = False,
    or_like: re.Pattern[str] | None = None,
    or_words: str = "",
    several: bool = False,
    affects: Affects = "result",
) -> Any:
    """A dataclass field with its legal values: ``choices``, or a range (``above`` is exclusive), ``or_zero`` beside it.

    Beside the choices, a value may be what matches ``or_like``, which errors call ``or_words``; with ``several``, a
    list of such values, separated by commas. ``default`` is for the hyper-parameters of other packages.
    """
    legal: dict[str, Any] = {**locals(), "choices": None if choices is None else tuple(choices)}
    return dataclasses.field(metadata=legal) if default is None else dataclasses.field(metadata=legal, default=default)


@dataclass_transform(frozen_default=True)
class Table:
    """A table of settings; its subclasses are frozen dataclasses by themselves."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)


def typed(text: str, wanted: Callable[[str], Scalar]) -> Scalar:
    """``text`` in the wanted type, or as it is where it does not fit."""
    if wanted is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return wanted(text)
    except (TypeError, ValueError):
        return text


def flatten(table: Mapping[str, Any], prefix: str = "") -> Config:
    """Nested TOML tables -> dotted keys."""
    flat: Config = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def key_of(field_name: str) -> str:
    """``batch_size`` -> ``batch-size``; ``lambda_``, which is no Python keyword, -> ``lambda``."""
    return field_name.rstrip("_").replace("_", "-")


def keys_of(section: type, prefix: str = "") -> list[str]:
    return [prefix + key_of(field.name) for field in dataclasses.fields(section)]


def types_of(section: type) -> dict[str, type]:
    """The type of each key of ``section``."""
    return {key_of(field.name): _hints(section)[field.name] for field in dataclasses.fields(section)}


def read_section(section: type[Section], config: Values, problems: list[str], prefix: str = "") -> Section | None:
    """Build ``section`` from ``config``; on any problem append lines to ``problems`` and return None."""
    values, before = dict[str, Any](), len(problems)
    for field, wanted in zip(dataclasses.fields(section), types_of(section).values(), strict=True):  # type: ignore[arg-type]
        key = prefix + key_of(field.name)
        if key not in config:
            problems.append(f"{key}: missing from the configuration")
            continue
        values[field.name], problem = _checked(config[key], wanted, field.metadata or option().metadata)
        problems += [f"{key} = {config[key]!r}: {problem}"] if problem else []
    return section(**values) if len(problems) == before else None


def read_pairs(section: type[Section], name: str, text: str) -> Section:
    """Build ``section`` from its defaults and the setting ``name``, "KEY=VALUE, …"; SettingsError for a wrong pair."""
    kinds, chosen = types_of(section), dict[str, Scalar]()
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise SettingsError(f"{name} = {text!r}: {part!r} is not KEY=VALUE")
        if key in chosen:
            raise SettingsError(f"{name} = {text!r}: {key} stands twice")
        chosen[key] = typed(value, kinds.get(key, str))
    defaults = {key_of(field.name): field.default for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    values = {key: value for key, value in (defaults | chosen).items() if value is not dataclasses.MISSING}
    problems = [f"{line}; it has {', '.join(kinds)}" for line in unknown_keys(chosen, kinds)]
    built = read_section(section, values, problems)
    if problems or built is None:
        raise SettingsError("\n".join(f"{name}: {line}" for line in problems))
    return built


def unknown_keys(config: Values, legal: Iterable[str], likely: Sequence[str] = ()) -> list[str]:
    """A line for each key of ``config`` that is not legal, with the nearest legal one, of the ``likely`` ones first."""
    legal = dict.fromkeys(legal)
    return [f"{key}: unknown key{_nearest(key, list(legal), likely)}" for key in config if key not in legal]


def homeless(config: Values) -> list[str]:
    """A line for each folder ``~USER/…`` of a user whom this machine does not have."""
    lost = [(key, at) for key, at in config.items() if key.endswith("-dir") and expanduser(str(at))[:1] == "~"]
    return [f"{key} = {at!r}: this machine has no such user; write the whole path" for key, at in lost]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`` (did you mean …?)`` with the nearest choice, whatever letters are capitals, or ""."""
    small = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), small, n=1)
    return f" (did you mean {small[near[0]]}?)" if near else ""


def _nearest(key: str, legal: Sequence[str], likely: Sequence[str]) -> str:
    """The nearest key by its bare name, without a table's; of several with that name the first."""
    if "." in key and key.partition(".")[0] not in {name.partition(".")[0] for name in legal}:
        return "; hyper-parameters of a package's algorithm stand in hparams"
    near = difflib.get_close_matches(key, legal, n=1) if "." in key else []
    for names in (likely, legal):
        bare = {name.rpartition(".")[2]: name for name in reversed(names)}
        near = near or [bare[name] for name in difflib.get_close_matches(key.rpartition(".")[2], bare, n=1)]
    return f"; did you mean {near[0]}?" if near else ""


def _checked(value: Scalar, wanted: type, legal: Mapping[str, Any]) -> tuple[Any, str]:
    if wanted not in TYPES:
        return None, f"its type is {wanted}; a setting is a bool, int, float or str"
    if legal["choices"] is not None and (problem := _not_among_choices(value, legal)):
        return None, problem
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        return None, f"must be {TYPES[wanted]}{range_text(legal)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not _in_range(value, legal):
        finite, most = ("", "") if abs(value) <= LARGEST else ("finite ", f" (in float32, up to {LARGEST:g})")
        most *= math.isfinite(value)
        return None, f"must be a {finite}number{range_text(legal)}{most}"
    return value, ""


def _not_among_choices(value: Scalar, legal: Mapping[str, Any]) -> str:
    choices, pattern = legal["choices"], legal["or_like"]
    parts = [part.strip() for part in value.split(",")] if legal["several"] and isinstance(value, str) else [value]
    wrong = [part for part in parts if part not in choices and not (pattern and pattern.fullmatch(str(part)))]
    if not wrong:
        return ""
    which = f"{wrong[0]!r}: " if len(parts) > 1 else ""
    listed = ", ".join(choice or repr("") for choice in choices)
    other = f", or {legal['or_words']}" if pattern else ""
    return f"{which}choose one of {listed}{other}{did_you_mean(str(wrong[0]), choices)}"


def _in_range(value: float, legal: Mapping[str, Any]) -> bool:
    low, high, above = legal["minimum"], legal["maximum"], legal["above"]
    inside = abs(value) <= LARGEST and (low is None or value >= low) and (high is None or value <= high)
    return (legal["or_zero"] and value == 0) or (inside and (above is None or value > above))


def range_text(legal: Mapping[str, Any]) -> str:
    """The range of an option's metadata in words, after a space; "" if it has none."""
    words = {"above": "above", "minimum": "at least", "maximum": "at most"}
    bounds = " and ".join(f"{word} {legal[key]:g}" for key, word in words.items() if legal[key] is not None)
    return f" {'0, or ' if legal['or_zero'] else ''}{bounds}" if bounds else ""
