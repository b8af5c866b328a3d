"""Typed options: from a flat run configuration to frozen dataclasses, with errors to act on.

A `Table` is a frozen dataclass whose fields are made by :func:`option`: all that is known of a
setting stands there. ``make docs`` writes the defaults into ``[tool.flwr.app.config]`` of
``pyproject.toml``, where Flower reads them, so every key of a section must be present in a run.
"""

import dataclasses
import difflib
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
    """Return the dataclass field of a setting: its default, its meaning and its legal values.

    A number may have a range: ``minimum``, ``maximum``, and ``above``, which is exclusive;
    ``or_zero`` allows 0 beside it. Without ``minimum`` and ``above`` it is at least 0. A string may
    have ``choices``; beside these it may be what matches ``or_like``, which errors call
    ``or_words``; with ``several``, it is a list of such values, separated by commas.

    A site's node config may set it where ``site`` says what it means there; ``at_most`` is the key
    of the node config that bounds it. ``with_secagg`` and ``with_dp`` say which value it must have
    under secure aggregation, and under differential privacy, where these do not allow all.
    """
    metadata = dict(locals())  # the arguments by name
    if choices is not None:
        metadata["choices"] = tuple(choices)
    if not isinstance(default, (bool, str)) and minimum is None and above is None:
        metadata["minimum"] = 0
    return dataclasses.field(metadata=metadata, default=default)


ANY_VALUE: Mapping[str, Any] = option(default="").metadata  # of a field not made by `option`


@dataclass_transform(frozen_default=True)
class Table:
    """A table of settings; its subclasses are frozen dataclasses by themselves."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)


def typed(text: str, wanted: Callable[[str], Scalar]) -> Scalar:
    """Return ``text`` as a value of the wanted type, or unchanged if it does not fit.

    A later check of the type then refuses it, and shows it as it was written.
    """
    if wanted is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return wanted(text)
    except (TypeError, ValueError):
        return text


def flatten(table: Mapping[str, Any], prefix: str = "") -> Config:
    """Return nested TOML tables as one with dotted keys: ``{"a": {"b": 1}}`` as ``{"a.b": 1}``.

    The ``prefix`` is put before each key.
    """
    flat: Config = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def key_of(field_name: str) -> str:
    """Return the key of a field: ``batch_size`` -> ``batch-size``, ``lambda_`` -> ``lambda``.

    The underscore at the end is for names that are Python keywords.
    """
    return field_name.rstrip("_").replace("_", "-")


def keys_of(section: type, prefix: str = "") -> list[str]:
    return [prefix + key_of(field.name) for field in dataclasses.fields(section)]


def types_of(section: type) -> dict[str, type]:
    """Return the type of each key of ``section``."""
    hints = _hints(section)
    return {key_of(field.name): hints[field.name] for field in dataclasses.fields(section)}


def read_section(
    section: type[Section], config: Values, problems: list[str], prefix: str = ""
) -> Section | None:
    """Build ``section`` from ``config``, where its keys have the ``prefix``; ignore other keys.

    Where keys are missing or values are not legal, append a line for each to ``problems``, and
    return None.
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
        problem = problem_with(value, wanted, field.metadata or ANY_VALUE)
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
    """Build ``section`` from its defaults and the pairs in ``text``: "KEY=VALUE, …".

    ``text`` is the value of the setting ``name``, which errors name. SettingsError for a pair that
    is malformed, is repeated, has an unknown key or a value that is not legal, and for a key
    without a default that no pair sets.
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
        if field.default is not dataclasses.MISSING:  # a key without a default must be in ``text``
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
    """Return a line for each setting of a folder ``~USER/…`` whose user this machine lacks."""
    lines = []
    for key, folder in config.items():
        # `expanduser` leaves the path of a user whom it does not know as it is
        is_of_unknown_user = expanduser(str(folder)).startswith("~")
        if key.endswith("-dir") and is_of_unknown_user:
            lines.append(f"{key} = {folder!r}: this machine has no such user; write the whole path")
    return lines


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` with the choice most like ``name``; "" if none is like it.

    Capital and small letters are the same here.
    """
    choice_of = {choice.lower(): choice for choice in choices}
    nearest = difflib.get_close_matches(name.lower(), choice_of, n=1)
    if not nearest:
        return ""
    return f" (did you mean {choice_of[nearest[0]]}?)"


def _nearest(key: str, legal: Sequence[str], likely: Sequence[str]) -> str:
    """Return words that suggest a legal key similar to the unknown ``key``; "" if none is similar.

    A ``TABLE.KEY`` is first compared as a whole. Then keys are compared by their names without a
    table, the ``likely`` ones first; of several with one name the first is suggested. A table that
    no legal key has is taken for that of another package's algorithm.
    """
    if "." in key:
        tables = {legal_key.partition(".")[0] for legal_key in legal}
        if key.partition(".")[0] not in tables:
            return "; hyper-parameters of a package's algorithm stand in hparams"
        nearest = difflib.get_close_matches(key, legal, n=1)
        if nearest:
            return f"; did you mean {nearest[0]}?"

    name = key.rpartition(".")[2]  # without its table
    for keys in (likely, legal):
        key_of_name: dict[str, str] = {}
        for legal_key in keys:
            key_of_name.setdefault(legal_key.rpartition(".")[2], legal_key)
        nearest = difflib.get_close_matches(name, key_of_name, n=1)
        if nearest:
            return f"; did you mean {key_of_name[nearest[0]]}?"
    return ""


def problem_with(value: Scalar, wanted: type, legal: Mapping[str, Any]) -> str:
    """Say why a setting cannot have this value; "" where it can.

    ``wanted`` is the type of its field, and ``legal`` the field's metadata, as `option` makes it.
    Whole numbers fit where a number is wanted.
    """
    if wanted not in TYPES:
        return f"its type is {wanted}; a setting is a bool, int, float or str"
    if legal["choices"] is not None:
        problem = _not_among_choices(value, legal)
        if problem:
            return problem
    must_be = f"must be {TYPES[wanted]}{range_text(legal)}"
    if not _has_type(value, wanted):
        return must_be
    if isinstance(value, (bool, str)):
        return ""
    if not abs(value) <= LARGEST_FLOAT32:  # in this form nan is refused too
        return f"must be a finite number{range_text(legal)} (in float32, up to {LARGEST_FLOAT32:g})"
    return "" if _is_in_range(value, legal) else must_be


def _has_type(value: Scalar, wanted: type) -> bool:
    """Return whether the value has the type. An int is a float too, but a bool is no number."""
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, (int, float))
    return isinstance(value, wanted)


def _not_among_choices(value: Scalar, legal: Mapping[str, Any]) -> str:
    """Say which part of a value is neither a choice nor like ``or_like``; "" if there is none.

    ``legal`` is the metadata that `option` makes. If it allows several values, the value is a list
    of parts, separated by commas; else it is one part.
    """
    choices = legal["choices"]
    pattern = legal["or_like"]

    parts: list[Scalar] = [value]
    if legal["several"] and isinstance(value, str):
        parts = [*parts_of(value)] or [value]  # "" has no parts, but may be a choice

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
    """Return whether a number is in the range of `option`'s metadata."""
    if legal["or_zero"] and value == 0:
        return True
    if legal["minimum"] is not None and value < legal["minimum"]:
        return False
    if legal["maximum"] is not None and value > legal["maximum"]:
        return False
    return legal["above"] is None or value > legal["above"]


def range_text(legal: Mapping[str, Any]) -> str:
    """Return the range of `option`'s metadata in words, after a space: `` at least 1``; or ""."""
    bounds = []
    for key, words in (("above", "above"), ("minimum", "at least"), ("maximum", "at most")):
        bound = legal[key]
        if bound is not None:
            number = str(bound) if isinstance(bound, int) else f"{bound:g}"
            bounds.append(f"{words} {number}")
    if not bounds:
        return ""
    zero = "0, or " if legal["or_zero"] else ""
    return f" {zero}{' and '.join(bounds)}"
