"""Typed options: from a flat run configuration to frozen dataclasses, with errors to act on.

A `Table` is a frozen dataclass whose fields are made by :func:`option`: all that is known of a
setting stands there. ``make docs`` writes the defaults into ``[tool.flwr.app.config]`` of
``pyproject.toml``, where Flower reads them, so every key of a section must be present in a run.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from os.path import expanduser
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

from protofl_common.config.lists import parts_of

Scalar = bool | int | float | str
Config = dict[str, Scalar]  # a flat configuration: of a run, or of its federation
Values = Mapping[str, Scalar]  # one that is only read: of a run, or of a node
Section = TypeVar("Section")
LARGEST_FLOAT32 = 3.4e38  # the largest finite number: PyTorch computes in float32
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_hints = cache(get_type_hints)
Affects = Literal["result", "data", "name", "machine", "waiting", "display"]
"""What a setting changes: results; samples; name and place of results; where things are on a
machine; who is waited for; what is shown."""


class SettingsError(ValueError):
    """One or more settings are wrong; the message has one line per setting."""


class Needed(NamedTuple):
    """What a setting must be under a protection, unless it has its default."""

    value: Scalar
    why: str


def option(
    *,
    default: Scalar,
    help: str = "",
    choices: Iterable[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    or_zero: bool = False,
    or_like: re.Pattern[str] | None = None,
    or_words: str = "",
    several: bool = False,
    affects: Affects = "result",
    site: str = "",
    at_most: str = "",
    with_secagg: Needed | None = None,
    with_dp: Needed | None = None,
) -> Any:
    """A dataclass field with its default, its meaning and its legal values.

    These are ``choices``, or a range.

    A range may have ``minimum``, ``maximum`` and ``above``, which is exclusive; ``or_zero`` allows
    0 beside it. Beside the choices, a value may be what matches ``or_like``, which errors call
    ``or_words``; with ``several``, a list of such values, separated by commas.

    A site's node config may set it where ``site`` says what it means there; ``at_most`` is the key
    of the node config that bounds it. ``with_secagg`` and ``with_dp`` say what it must be under
    secure aggregation, and under differential privacy, if these do not go with all its values.
    """
    legal: dict[str, Any] = {
        "choices": None if choices is None else tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "or_zero": or_zero,
        "or_like": or_like,
        "or_words": or_words,
        "several": several,
        "affects": affects,
        "site": site,
        "at_most": at_most,
        "with_secagg": with_secagg,
        "with_dp": with_dp,
        "help": help,
    }
    return dataclasses.field(metadata=legal, default=default)


_ANY_VALUE: Mapping[str, Any] = option(default=0).metadata  # of a field that is none of `option`'s


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
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def key_of(field_name: str) -> str:
    """``batch_size`` -> ``batch-size``; ``lambda_``, which is no Python keyword, -> ``lambda``."""
    return field_name.rstrip("_").replace("_", "-")


def keys_of(section: type, prefix: str = "") -> list[str]:
    return [prefix + key_of(field.name) for field in dataclasses.fields(section)]


def types_of(section: type) -> dict[str, type]:
    """The type of each key of ``section``."""
    hints = _hints(section)
    return {key_of(field.name): hints[field.name] for field in dataclasses.fields(section)}


def read_section(
    section: type[Section], config: Values, problems: list[str], prefix: str = ""
) -> Section | None:
    """Build ``section`` from ``config``, whose keys begin with ``prefix``.

    On any problem append lines to ``problems``, and return None.
    """
    values: dict[str, Any] = {}
    problems_before = len(problems)
    types = types_of(section)
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        wanted = types[key_of(field.name)]
        key = prefix + key_of(field.name)
        if key not in config:
            problems.append(f"{key}: missing from the configuration")
            continue
        value = config[key]
        problem = _problem_with(value, wanted, field.metadata or _ANY_VALUE)
        if problem:
            problems.append(f"{key} = {value!r}: {problem}")
            continue
        if wanted is float and isinstance(value, int):
            value = float(value)
        values[field.name] = value
    if len(problems) > problems_before:
        return None
    return section(**values)


def read_pairs(section: type[Section], name: str, text: str) -> Section:
    """Build ``section`` from its defaults and the setting ``name``, "KEY=VALUE, …".

    SettingsError for a wrong pair.
    """
    types = types_of(section)
    chosen: dict[str, Scalar] = {}
    for pair in filter(None, parts_of(text)):
        key, equals, value = (word.strip() for word in pair.partition("="))
        if not equals:
            raise SettingsError(f"{name} = {text!r}: {pair!r} is not KEY=VALUE")
        if key in chosen:
            raise SettingsError(f"{name} = {text!r}: {key} stands twice")
        chosen[key] = typed(value, types.get(key, str))

    values: dict[str, Scalar] = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        if field.default is not dataclasses.MISSING:
            values[key_of(field.name)] = field.default
    values |= chosen

    problems = [f"{line}; it has {', '.join(types)}" for line in unknown_keys(chosen, types)]
    built = read_section(section, values, problems)
    if problems or built is None:
        raise SettingsError("\n".join(f"{name}: {line}" for line in problems))
    return built


def unknown_keys(config: Values, legal: Iterable[str], likely: Sequence[str] = ()) -> list[str]:
    """Return a line for each key of ``config`` that is not legal, and suggest a similar legal key.

    The first of these that exists is suggested: for an unknown ``TABLE.KEY`` the legal key that is
    similar as a whole, then one of the ``likely`` keys with a similar name, then any legal key with
    a similar name.
    """
    legal_keys = list(legal)
    known = set(legal_keys)
    unknown = [key for key in config if key not in known]
    return [f"{key}: unknown key{_nearest(key, legal_keys, likely)}" for key in unknown]


def folders_of_unknown_users(config: Values) -> list[str]:
    """A line for each folder ``~USER/…`` of a user whom this machine does not have."""
    lines = []
    for key, folder in config.items():
        if key.endswith("-dir") and expanduser(str(folder)).startswith("~"):
            lines.append(f"{key} = {folder!r}: this machine has no such user; write the whole path")
    return lines


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`` (did you mean …?)`` with the nearest choice, whatever letters are capitals, or ""."""
    by_small_letters = {choice.lower(): choice for choice in choices}
    nearest = difflib.get_close_matches(name.lower(), by_small_letters, n=1)
    if not nearest:
        return ""
    return f" (did you mean {by_small_letters[nearest[0]]}?)"


def _nearest(key: str, legal: Sequence[str], likely: Sequence[str]) -> str:
    """Words that name the nearest legal key, or "".

    Keys are compared by their names without a table; of several with one name the first counts.
    """
    if "." in key:
        tables = {known.partition(".")[0] for known in legal}
        if key.partition(".")[0] not in tables:
            return "; hyper-parameters of a package's algorithm stand in hparams"
        whole = difflib.get_close_matches(key, legal, n=1)
        if whole:
            return f"; did you mean {whole[0]}?"

    name = key.rpartition(".")[2]
    for keys in (likely, legal):
        key_of_name: dict[str, str] = {}
        for known in keys:
            key_of_name.setdefault(known.rpartition(".")[2], known)
        nearest = difflib.get_close_matches(name, key_of_name, n=1)
        if nearest:
            return f"; did you mean {key_of_name[nearest[0]]}?"
    return ""


def _problem_with(value: Scalar, wanted: type, legal: Mapping[str, Any]) -> str:
    """Say why ``value`` is none of the ``wanted`` type, or not ``legal``; "" where it is."""
    if wanted not in TYPES:
        return f"its type is {wanted}; a setting is a bool, int, float or str"
    if legal["choices"] is not None:
        problem = _not_among_choices(value, legal)
        if problem:
            return problem
    if isinstance(value, bool):  # which Python takes for a whole number
        return "" if wanted is bool else f"must be {TYPES[wanted]}{range_text(legal)}"
    fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
    if not fits:
        return f"must be {TYPES[wanted]}{range_text(legal)}"
    if isinstance(value, (int, float)) and not _is_in_range(value, legal):
        return _range_broken(value, legal)
    return ""


def _not_among_choices(value: Scalar, legal: Mapping[str, Any]) -> str:
    choices = legal["choices"]
    pattern = legal["or_like"]

    parts: list[Scalar] = [value]
    if legal["several"] and isinstance(value, str):
        parts = [*parts_of(value)] or [value]

    def is_legal(part: Scalar) -> bool:
        return part in choices or bool(pattern and pattern.fullmatch(str(part)))

    wrong = [part for part in parts if not is_legal(part)]
    if not wrong:
        return ""
    which = f"{wrong[0]!r}: " if len(parts) > 1 else ""
    listed = ", ".join(choice or repr("") for choice in choices)
    if pattern:
        listed += f", or {legal['or_words']}"
    return f"{which}choose one of {listed}{did_you_mean(str(wrong[0]), choices)}"


def _is_in_range(value: float, legal: Mapping[str, Any]) -> bool:
    if legal["or_zero"] and value == 0:
        return True
    if not abs(value) <= LARGEST_FLOAT32:  # nan, too
        return False
    if legal["minimum"] is not None and value < legal["minimum"]:
        return False
    if legal["maximum"] is not None and value > legal["maximum"]:
        return False
    return legal["above"] is None or value > legal["above"]


def _range_broken(value: float, legal: Mapping[str, Any]) -> str:
    if abs(value) <= LARGEST_FLOAT32:
        return f"must be a number{range_text(legal)}"
    if not math.isfinite(value):
        return f"must be a finite number{range_text(legal)}"
    return f"must be a finite number{range_text(legal)} (in float32, up to {LARGEST_FLOAT32:g})"


def range_text(legal: Mapping[str, Any]) -> str:
    """The range of an option's metadata in words, after a space; "" if it has none."""
    bounds = []
    for key, words in (("above", "above"), ("minimum", "at least"), ("maximum", "at most")):
        if legal[key] is not None:
            bounds.append(f"{words} {legal[key]:g}")
    if not bounds:
        return ""
    zero = "0, or " if legal["or_zero"] else ""
    return f" {zero}{' and '.join(bounds)}"
