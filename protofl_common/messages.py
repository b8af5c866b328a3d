"""The wire: typed payloads to and from Flower's ``RecordDict``.

Both directions of an exchange are declared in the catalog as a :class:`~protofl_common.catalog.Crossing`. Packing
anything undeclared is a programming error; unpacking checks every name, shape, dtype and range and raises
:class:`RefusedMessage` with the reason. Arrays travel as raw little-endian bytes: no pickle, and 4 bytes a number.

Records of a message
    ``prototypes``  means [P, D] float32, labels [P] int64, and counts [P] int64 where declared
    ``local-sets``  means [P, D] float32, labels [P] int64, owners [P] int64: the sets one after another
    ``weights``     the model's state dict, where declared
    ``insight``     client to server, after the last round, where asked for and allowed: :class:`Insight`
    ``round``       server to client: :class:`Instructions`
    ``report``      client to server: :class:`Report`, scalars only
    ``site``        client to server, once: :class:`SiteCard`
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from protofl_common.catalog import Crossing
from protofl_common.insight import MAX_FEATURES, Insight
from protofl_common.lineage import Lineage
from protofl_common.prototypes import Prototypes
from protofl_common.texts import printable

RAW = "raw-little-endian"
_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
_MAX_SCALARS = 64
_LARGEST = 1e30
"""Magnitude of a number in a report; sums over clients stay finite."""
_LONGEST = 200
"""Characters of a name in an introduction."""
INFERENCES = ("head", "prototype")
PHASES = ("load", "evaluate", "train", "prototypes", "save")
"""What a report may tell of: ways to predict, and phases of a client's round."""
MAX_SETS = 10_000
"""Clients whose prototypes a message may carry."""

Weights = dict[str, Tensor]
_Card = TypeVar("_Card", "Instructions", "SiteCard")


class RefusedMessage(ValueError):
    """What arrived is not what the catalog declares; the message, of bounded length, says what is wrong with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


@dataclass(frozen=True)
class Payload:
    """What the algorithms exchange."""

    prototypes: Prototypes | None = None
    weights: Weights | None = None
    local_sets: tuple[Prototypes, ...] = ()
    """Every client's prototypes, in the order of the sites; none where they are not exchanged."""
    insight: Insight | None = None
    """What a client tells for the report; None from one that does not."""


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts."""

    num_classes: int
    feature_dim: int
    max_norm: float = math.inf
    weights: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name -> (dtype, shape) of every array of the model, where weights are exchanged."""
    max_per_class: int = 1000
    """Prototypes of one class in one message, where several are allowed at all."""
    backbones: int = 0
    """K, the frozen backbones that an insight compares."""


@dataclass(frozen=True)
class Instructions:
    """What the server asks of a client."""

    round: int
    """From 1; the final evaluation carries the number of the last round."""
    run_name: str
    evaluate: bool
    lineage: Lineage
    """Which states of a client count, where the run was resumed."""


@dataclass(frozen=True)
class Report:
    """What a client says of its round: scalars only."""

    round: int
    train_samples: int
    test_samples: int
    correct: dict[str, int] = field(default_factory=dict)
    """Correct test predictions per inference (`INFERENCES`), with what was received."""
    losses: dict[str, float] = field(default_factory=dict)
    """Mean over the round's training samples: ``total`` and each of its terms (`Algorithm.reported_losses`)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Per phase of the client's round (`PHASES`)."""


@dataclass(frozen=True)
class SiteCard:
    """How a site introduces itself, once, before the first round."""

    name: str
    partition: int
    num_partitions: int
    domain: str
    arch: str
    in_channels: int
    image_size: int
    parameters: int
    train_samples: int
    test_samples: int
    classes: tuple[str, ...]
    """Names of all classes of the data set, in label order."""
    holds: tuple[int, ...]
    """Labels of its training samples, where it will send prototypes of them; elsewhere nothing is told."""


# -- payloads --------------------------------------------------------------------------------------------------------


def pack_payload(payload: Payload, crossing: Crossing) -> RecordDict:
    """The declared parts of ``payload`` as array records; ValueError if it holds anything undeclared."""
    prototypes, sets, weights = payload.prototypes, payload.local_sets, payload.weights
    if prototypes is not None and not crossing.prototypes:
        raise ValueError("prototypes are not declared for this direction")
    if prototypes is not None and prototypes.counts is not None and not crossing.counts:
        raise ValueError("class counts are not declared for this direction")
    if prototypes is not None and not crossing.many_per_class and _largest_class(prototypes.labels) > 1:
        raise ValueError("several prototypes of a class are not declared for this direction")
    if sets and not crossing.local_sets:
        raise ValueError("local sets are not declared for this direction")
    if weights is not None and not crossing.weights:
        raise ValueError("weights are not declared for this direction")
    content = RecordDict()
    if prototypes is not None:
        arrays = {"means": prototypes.means, "labels": prototypes.labels}
        if prototypes.counts is not None:
            arrays["counts"] = prototypes.counts
        content["prototypes"] = _array_record(arrays)
    if sets:
        owners = [torch.full((len(one),), index, dtype=torch.int64) for index, one in enumerate(sets)]
        means, labels = torch.cat([one.means for one in sets]), torch.cat([one.labels for one in sets])
        content["local-sets"] = _array_record({"means": means, "labels": labels, "owners": torch.cat(owners)})
    if weights is not None:
        content["weights"] = _array_record(weights)
    if payload.insight is not None:
        content["insight"] = _pack_insight(payload.insight, crossing.insight)
    return content


def unpack_payload(content: RecordDict, crossing: Crossing, limits: Limits, required: bool) -> Payload:
    """The checked payload of a message; ``required``: every declared part must be there.

    Raises
    ------
    RefusedMessage
        For an undeclared or missing record or array, a wrong dtype or shape, NaN or infinity, a label out of range
        or twice, a count below 1, a norm above the limit.
    """
    declared = {"prototypes": crossing.prototypes, "local-sets": crossing.local_sets, "weights": crossing.weights}
    declared["insight"] = crossing.insight != "none"
    for name in content.array_records:
        if not declared.get(name):
            raise RefusedMessage(f"an undeclared array record {name!r}")
    for name, wanted in declared.items():
        if wanted and required and name not in content.array_records:
            raise RefusedMessage(f"no {name}")
    prototypes = weights = None
    sets: tuple[Prototypes, ...] = ()
    if "prototypes" in content.array_records:
        prototypes = _unpack_prototypes(content.array_records["prototypes"], crossing, limits)
    if "local-sets" in content.array_records:
        sets = _unpack_sets(content.array_records["local-sets"], limits)
    if "weights" in content.array_records:
        weights = _unpack_weights(content.array_records["weights"], limits)
    insight = None
    if "insight" in content.array_records:
        insight = _unpack_insight(content.array_records["insight"], crossing.insight, limits)
    return Payload(prototypes, weights, sets, insight)


def check_size(content: RecordDict, crossing: Crossing, limits: Limits) -> None:
    """Refuse a message with more bytes than a valid one can have, before any of it is decoded or copied."""
    rows = limits.num_classes * (limits.max_per_class if crossing.many_per_class else 1)
    largest = rows * (4 * limits.feature_dim + 8 + 8 * crossing.counts) if crossing.prototypes else 0
    if crossing.local_sets:
        largest += MAX_SETS * limits.num_classes * (4 * limits.feature_dim + 16)
    if crossing.weights:
        largest += sum(math.prod(shape) * _DTYPES[dtype].itemsize for dtype, shape in limits.weights.values())
    if crossing.insight != "none":
        largest += 8 * limits.num_classes + 4 * limits.backbones
    if crossing.insight == "features":
        largest += MAX_FEATURES * (4 * limits.feature_dim + 8)
    if (size := payload_bytes(content)) > largest:
        raise RefusedMessage(f"{size} bytes of arrays, where a valid reply has at most {largest}")


def payload_bytes(content: RecordDict) -> int:
    """Bytes of all arrays in a message, as they travel."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def template_of(weights: Weights) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape): what `Limits.weights` compares with."""
    return {name: (_dtype_name(value), tuple(value.shape)) for name, value in weights.items()}


def _unpack_prototypes(record: ArrayRecord, crossing: Crossing, limits: Limits) -> Prototypes:
    wanted = {"means", "labels", "counts"} if crossing.counts else {"means", "labels"}
    if set(record) != wanted:
        raise RefusedMessage(f"prototypes with the arrays {sorted(record)} instead of {sorted(wanted)}")
    max_per_class = limits.max_per_class if crossing.many_per_class else 1
    rows = _rows(record["means"], "prototypes", limits.num_classes * max_per_class)
    means = _tensor(record["means"], "prototype means", "float32", (rows, limits.feature_dim))
    labels = _tensor(record["labels"], "prototype labels", "int64", (rows,))
    counts = _tensor(record["counts"], "prototype counts", "int64", (rows,)) if crossing.counts else None
    _check_prototypes(means, labels, limits, max_per_class)
    if counts is not None and int(counts.min()) < 1:
        raise RefusedMessage("a count below 1")
    return Prototypes(means, labels, counts)


def _unpack_sets(record: ArrayRecord, limits: Limits) -> tuple[Prototypes, ...]:
    if set(record) != {"means", "labels", "owners"}:
        raise RefusedMessage(f"local sets with the arrays {sorted(record)} instead of ['labels', 'means', 'owners']")
    rows = _rows(record["means"], "local prototypes", limits.num_classes * MAX_SETS)
    means = _tensor(record["means"], "local set means", "float32", (rows, limits.feature_dim))
    labels = _tensor(record["labels"], "local set labels", "int64", (rows,))
    owners = _tensor(record["owners"], "local set owners", "int64", (rows,))
    changes = owners.diff(prepend=owners.new_full((1,), -1))
    if not bool(((changes == 0) | (changes == 1)).all()):
        raise RefusedMessage("local sets whose owners are not numbered 0, 1, 2, … in order")
    sets = tuple(Prototypes(means[owners == one], labels[owners == one]) for one in owners.unique().tolist())
    for one in sets:
        _check_prototypes(one.means, one.labels, limits, max_per_class=1)
    return sets


def _pack_insight(insight: Insight, level: str) -> ArrayRecord:
    """What ``level`` declares of it; ValueError if it tells more."""
    told = {name: value for name, value in vars(insight).items() if value is not None}
    if odd := sorted(told.keys() - _insight_arrays(level, True)):
        raise ValueError(f"insight.{odd[0]} is not declared for this direction (insight = {level!r})")
    return _array_record(told)


def _insight_arrays(level: str, backbones: bool) -> set[str]:
    if level == "none":
        return set()
    arrays = {"counts", "features", "labels"} if level == "features" else {"counts"}
    return arrays | ({"similarity"} if backbones else set())


def _unpack_insight(record: ArrayRecord, level: str, limits: Limits) -> Insight:
    wanted = _insight_arrays(level, limits.backbones > 0)
    if set(record) != wanted:
        raise RefusedMessage(f"an insight with the arrays {sorted(record)} instead of {sorted(wanted)}")
    counts = _tensor(record["counts"], "insight counts", "int64", (limits.num_classes,))
    if int(counts.min()) < 0:
        raise RefusedMessage("insight counts below 0")
    similarity = features = labels = None
    if "similarity" in wanted:
        similarity = _tensor(record["similarity"], "insight similarity", "float32", (limits.backbones,))
        if float(similarity.abs().max()) > 1.001:
            raise RefusedMessage("an insight similarity outside -1..1")
    if "features" in wanted:
        rows = record["labels"].shape[0] if len(record["labels"].shape) else 0
        if type(rows) is not int or not 0 <= rows <= MAX_FEATURES:
            raise RefusedMessage(f"an insight of {printable(str(rows))} features, not from 0 to {MAX_FEATURES}")
        features = _tensor(record["features"], "insight features", "float32", (rows, limits.feature_dim))
        labels = _tensor(record["labels"], "insight labels", "int64", (rows,))
        if rows and not 0 <= int(labels.min()) <= int(labels.max()) < limits.num_classes:
            raise RefusedMessage(f"an insight label outside 0..{limits.num_classes - 1}")
        if rows and (norm := float(torch.linalg.vector_norm(features.double(), dim=1).max())) > limits.max_norm:
            raise RefusedMessage(f"an insight feature of norm {norm:.3g}, above {limits.max_norm:g}")
    return Insight(counts, similarity, features, labels)


def _rows(array: Array, what: str, largest: int) -> int:
    """The length of an array's first axis, checked before any of it is decoded."""
    _check_shape(array, what)
    rows = array.shape[0] if len(array.shape) else 0
    if not 1 <= rows <= largest:
        raise RefusedMessage(f"{rows} {what}, not from 1 to {largest}")
    return rows


def _check_shape(array: Array, what: str) -> None:
    """Flower hands on whatever stands in the sender's JSON."""
    if any(type(length) is not int for length in array.shape):
        raise RefusedMessage(f"{what}: a shape of other things than whole numbers")


def _check_prototypes(means: Tensor, labels: Tensor, limits: Limits, max_per_class: int) -> None:
    if int(labels.min()) < 0 or int(labels.max()) >= limits.num_classes:
        raise RefusedMessage(f"a label outside 0..{limits.num_classes - 1}")
    if (most := _largest_class(labels)) > max_per_class:
        same = "two prototypes with the same label" if max_per_class == 1 else f"{most} prototypes with the same label"
        raise RefusedMessage(same)
    norm = float(torch.linalg.vector_norm(means.double(), dim=1).max())
    if norm > limits.max_norm:
        raise RefusedMessage(f"a prototype of norm {norm:.3g}, above {limits.max_norm:g} (max-prototype-norm)")


def _largest_class(labels: Tensor) -> int:
    return int(torch.bincount(labels).max()) if len(labels) else 0


def _unpack_weights(record: ArrayRecord, limits: Limits) -> Weights:
    if set(record) != set(limits.weights):
        odd = sorted(set(record) ^ set(limits.weights))
        raise RefusedMessage(f"weights that do not fit the model: {', '.join(odd[:3])}{' …' if odd[3:] else ''}")
    return {
        name: _tensor(record[name], f"weights {name}", dtype, shape) for name, (dtype, shape) in limits.weights.items()
    }


def _array_record(arrays: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: _array(value) for name, value in arrays.items()})


def _array(value: Tensor) -> Array:
    dtype = _dtype_name(value)
    if dtype not in _DTYPES:
        raise ValueError(f"cannot send {value.dtype}; the wire carries {', '.join(_DTYPES)}")
    data = value.detach().cpu().contiguous().numpy().astype(_DTYPES[dtype], copy=False).tobytes()
    return Array(dtype=dtype, shape=tuple(value.shape), stype=RAW, data=data)


def _tensor(array: Array, what: str, dtype: str, shape: tuple[int | None, ...]) -> Tensor:
    """Decode one array, whose dtype and shape must be those given (None: any length)."""
    if array.stype != RAW or array.dtype != dtype:
        raise RefusedMessage(f"{what}: {array.stype} {array.dtype} instead of {RAW} {dtype}")
    _check_shape(array, what)
    fits = len(array.shape) == len(shape) and all(w in (None, g) for g, w in zip(array.shape, shape, strict=True))
    if not fits or any(length < 0 for length in array.shape):
        wanted = "×".join("any" if length is None else str(length) for length in shape)
        raise RefusedMessage(f"{what}: shape {'×'.join(map(str, array.shape))} instead of {wanted}")
    if len(array.data) != math.prod(array.shape) * _DTYPES[dtype].itemsize:
        raise RefusedMessage(f"{what}: {len(array.data)} bytes do not fill the shape {tuple(array.shape)}")
    values = np.frombuffer(array.data, dtype=_DTYPES[dtype]).reshape(array.shape)
    if dtype == "float32" and not np.isfinite(values).all():
        raise RefusedMessage(f"{what}: NaN or infinity")
    return torch.from_numpy(values.astype(_DTYPES[dtype].newbyteorder("="), copy=True))


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


# -- scalars ---------------------------------------------------------------------------------------------------------


def pack_instructions(instructions: Instructions) -> ConfigRecord:
    """The record ``round`` of a message to a client."""
    return ConfigRecord(dataclasses.asdict(instructions) | {"lineage": instructions.lineage.text})


def unpack_instructions(content: RecordDict) -> Instructions:
    """The record ``round``; RefusedMessage if it is missing or malformed."""
    instructions = _from_config(Instructions, content, "round")
    try:
        return dataclasses.replace(instructions, lineage=Lineage.parse(str(instructions.lineage)))
    except ValueError:
        raise RefusedMessage(f"round.lineage is {instructions.lineage!r}") from None


def pack_site_card(card: SiteCard) -> ConfigRecord:
    """The record ``site`` of an introduction."""
    values = dataclasses.asdict(card)
    return ConfigRecord(values | {"classes": list(card.classes), "holds": list(card.holds)})


def unpack_site_card(content: RecordDict) -> SiteCard:
    """The record ``site``; RefusedMessage if it is missing or malformed, or a number or name is out of range."""
    if set(content) != {"site"}:
        raise RefusedMessage("records other than 'site'")
    card = _from_config(SiteCard, content, "site")
    for key, value in dataclasses.asdict(card).items():
        if isinstance(value, int) and value < 0:
            raise RefusedMessage(f"site.{key} is {value}")
        for text in value if key == "classes" else (value,):
            if isinstance(text, str) and (len(text) > _LONGEST or not text.isprintable()):
                raise RefusedMessage(f"site.{key} with a name that is too long or not printable: {text!r}")
    if not card.name or "/" in card.name or not all(isinstance(name, str) for name in card.classes):
        raise RefusedMessage(f"site.name is {card.name!r}, site.classes is {card.classes!r}")
    held = list(card.holds)
    in_range = all(type(label) is int and 0 <= label < len(card.classes) for label in held)
    if not in_range or held != sorted(set(held)):
        raise RefusedMessage(f"site.holds is {held!r}")
    return dataclasses.replace(card, classes=tuple(card.classes), holds=tuple(held))


def pack_report(report: Report, losses: Collection[str]) -> MetricRecord:
    """The record ``report`` of a reply: dictionaries become dotted names.

    ValueError for a name that is not declared: one of ``losses``, `INFERENCES` and `PHASES`.
    """
    names = {"losses": losses, "correct": INFERENCES, "seconds": PHASES}
    for group, declared in names.items():
        if odd := sorted(getattr(report, group).keys() - set(declared)):
            raise ValueError(f"{group}.{odd[0]} is not declared; choose from {', '.join(declared)}")
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(report).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": number for key, number in value.items()}
        else:
            flat[name] = value
    return MetricRecord(flat)


def unpack_report(content: RecordDict, expected_round: int, losses: Collection[str]) -> Report:
    """The record ``report``, checked; ``losses``: the names that its losses may have.

    Raises
    ------
    RefusedMessage
        If it is missing or malformed, from another round (a replay), has a number that is not finite or a name that
        is not declared, or claims more correct predictions than test samples.
    """
    if set(content.metric_records) != {"report"} or content.config_records:
        raise RefusedMessage("records other than a report")
    flat = content.metric_records["report"]
    if len(flat) > _MAX_SCALARS:
        raise RefusedMessage(f"a report of {len(flat)} numbers")
    names = {"losses": losses, "correct": INFERENCES, "seconds": PHASES}
    plain: dict[str, int] = {}
    nested: dict[str, dict[str, float]] = {"correct": {}, "losses": {}, "seconds": {}}
    for name, value in flat.items():
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # type: ignore[arg-type]
            raise RefusedMessage(f"a report whose {name} is not a finite number of at most {_LARGEST:g}")
        assert isinstance(value, (int, float))
        group, _, key = name.partition(".")
        if group in names and key in names[group] and (group == "losses" or value >= 0):
            nested[group][key] = value
        elif name in ("round", "train_samples", "test_samples") and isinstance(value, int) and value >= 0:
            plain[name] = value
        else:
            raise RefusedMessage(f"a report with the odd entry {name} = {value!r}")
    if len(plain) < 3:
        raise RefusedMessage("an incomplete report")
    if plain["round"] != expected_round:
        raise RefusedMessage(f"a reply to round {plain['round']} in round {expected_round}")
    correct = {name: int(value) for name, value in nested["correct"].items()}
    if any(value > plain["test_samples"] for value in correct.values()):
        raise RefusedMessage("more correct predictions than test samples")
    return Report(**plain, correct=correct, losses=nested["losses"], seconds=nested["seconds"])


def _from_config(kind: type[_Card], content: RecordDict, name: str) -> _Card:
    record = content.config_records.get(name)
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if record is None or set(record) != set(fields):
        raise RefusedMessage(f"no complete record {name!r}")
    kinds = {"int": int, "str": str, "bool": bool, "tuple[str, ...]": list, "tuple[int, ...]": list, "Lineage": str}
    for key, value in record.items():
        if type(value) is not kinds[fields[key]]:
            raise RefusedMessage(f"{name}.{key} is {value!r}")
    return kind(**record)  # type: ignore[arg-type]
