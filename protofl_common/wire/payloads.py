"""Payloads of the algorithms, packed, checked and summed by what their rows of the catalog declare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.low_rank import LEFT, RIGHT, largest_rank, product
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.arrays import DTYPES, array_record, decoded, dtype_name, rows_of
from protofl_common.wire.limits import Limits, RefusedMessage, Template
from protofl_common.wire.schema import (
    Counts,
    Declared,
    Entry,
    Moments,
    Statistics,
    Update,
    Vectors,
    VectorSets,
    Weights,
    vectors_in,
)
from protofl_common.wire.statistics import ClientStatistics, bytes_of_statistics, pack_statistics, unpack_statistics

MAX_SETS = 10_000
"""Clients whose prototypes a message may carry."""
NOT_NEGATIVE = ("running_var", "num_batches_tracked")
"""Buffers of batch normalisation; a negative variance makes every feature NaN."""
NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
ONE = torch.ones(())
MOST_SAMPLES, LARGEST = 2.0**20, 2.0**16
"""As how many samples a client, or a class of it, may weigh in a sum; the magnitude of a number of its model or
prototypes. What is beyond is cut."""
Shapes = list[tuple[str, tuple[int, ...]]]
StateDict = dict[str, Tensor]
Value = Prototypes | tuple[Prototypes, ...] | StateDict | Tensor | ClientStatistics


class Payload:
    """Values by the names under which the catalog declares them; one that is None is left out.

    Of a received payload, a name that is not declared is a KeyError.

    >>> Payload(prototypes=None).entries
    {}
    """

    def __init__(self, **entries: Value | None) -> None:
        self.entries = {name: value for name, value in entries.items() if value is not None}
        self.declared: Declared | None = None
        """Of a payload that was received: what could have been sent."""

    def _get(self, name: str) -> Value | None:
        if self.declared is not None and name not in self.declared:
            raise KeyError(f"{name} is not declared for this direction; declared: {', '.join(self.declared)}")
        return self.entries.get(name)

    def without_undeclared_counts(self, declared: Declared) -> Payload:
        """Drop the counts of prototypes for which ``declared`` has none: only protections needed them."""
        counted = {name for name, entry in vectors_in(declared).items() if entry.counts}
        entries = {
            name: value.without_counts() if isinstance(value, Prototypes) and name not in counted else value
            for name, value in self.entries.items()
        }
        return Payload(**entries)

    def vectors(self, name: str = "prototypes") -> Prototypes | None:
        """The entry, declared as `Vectors`; None where it was not sent."""
        value = self._get(name)
        return value if isinstance(value, Prototypes) else None

    def weights(self, name: str = "weights") -> StateDict | None:
        """The entry, declared as `Weights`; None where it was not sent."""
        value = self._get(name)
        return value if isinstance(value, dict) else None

    def sets(self, name: str) -> tuple[Prototypes, ...]:
        """The entry, declared as `VectorSets`, in the order of the sites; () where it was not sent."""
        value = self._get(name)
        return value if isinstance(value, tuple) else ()

    def counts(self, name: str) -> Tensor | None:
        """The entry, declared as `Counts`, [C] int64; None where it was not sent."""
        value = self._get(name)
        return value if isinstance(value, Tensor) else None

    def statistics(self, name: str = "statistics") -> ClientStatistics | None:
        """The entry, declared as `Statistics`; None where it was not sent."""
        value = self._get(name)
        return value if isinstance(value, ClientStatistics) else None


def pack_payload(payload: Payload, declared: Declared) -> RecordDict:
    """The declared entries as array records, in the order of the declaration; ValueError if one is undeclared."""
    if odd := [name for name in payload.entries if name not in declared]:
        raise ValueError(f"{odd[0]} is not declared for this direction; declared: {', '.join(declared) or 'nothing'}")
    content = RecordDict()
    for name, entry in declared.items():
        if name in payload.entries:
            content[name] = codec_of(entry).pack(name, payload.entries[name], entry)
    return content


def unpack_payload(content: RecordDict, declared: Declared, limits: Limits, required: bool) -> Payload:
    """The checked payload of a message; ``required``: every declared entry must be there.

    RefusedMessage for an undeclared or missing record or array, a wrong dtype or shape, NaN or infinity, a label out of
    range or twice, a count below 1, a norm above the limit, probabilities that are none.
    """
    for name in content.array_records:
        if name not in declared:
            raise RefusedMessage(f"an undeclared array record {name!r}")
    found: dict[str, Value] = {}
    for name, entry in declared.items():
        if name in content.array_records:
            found[name] = codec_of(entry).unpack(name, content.array_records[name], entry, limits)
        elif required:
            raise RefusedMessage(f"no {name}")
    payload = Payload(**found)
    payload.declared = declared
    return payload


def check_size(content: RecordDict, declared: Declared, limits: Limits) -> None:
    """Refuse a message with more bytes than a valid one can have, before any of it is decoded or copied."""
    largest = sum(codec_of(entry).most_bytes(name, entry, limits) for name, entry in declared.items())
    if (size := payload_bytes(content)) > largest:
        raise RefusedMessage(f"{size} bytes of arrays, where a valid reply has at most {largest}")


def payload_bytes(content: RecordDict) -> int:
    """Bytes of all arrays in a message, as they travel, and of keys and shares."""
    arrays = (array.data for record in content.array_records.values() for array in record.values())
    others = (value for record in content.config_records.values() for value in record.values())
    return sum(len(value) for value in (*arrays, *others) if isinstance(value, bytes))


def part_of(module: nn.Module, entry: Weights) -> StateDict:
    """The parameters and buffers of ``module`` that ``entry`` declares, as references."""
    layers = [f"{name}." for name, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))]
    out = layers[max(0, len(layers) - entry.without_last) :]
    if not entry.normalisation:
        out += [f"{name}." for name, part in module.named_modules() if isinstance(part, NORMALISATION)]
    named = {name: value for name, value in module.state_dict().items() if name.startswith(entry.parts)}
    return {name: value for name, value in named.items() if not name.startswith(tuple(out))} if out else named


def template_of(weights: StateDict) -> Template:
    """Name -> (dtype, shape): what `Limits.weights` compares with."""
    return {name: (dtype_name(value), tuple(value.shape)) for name, value in weights.items()}


# -- vectors of classes --------------------------------------------------------------------------------------------


def _pack_vectors(name: str, value: Prototypes, entry: Vectors) -> ArrayRecord:
    if value.counts is not None and not entry.counts:
        raise ValueError(f"class counts of {name} are not declared for this direction")
    if not entry.several and _largest_class(value.labels) > 1:
        raise ValueError(f"several {name} of a class are not declared for this direction")
    counts = {} if value.counts is None else {"counts": value.counts}
    return array_record({"means": value.means, "labels": value.labels, **counts})


def _unpack_vectors(name: str, record: ArrayRecord, entry: Vectors, limits: Limits) -> Prototypes:
    wanted = {"means", "labels", "counts"} if entry.counts else {"means", "labels"}
    if set(record) != wanted:
        raise RefusedMessage(f"{name} with the arrays {sorted(record)} instead of {sorted(wanted)}")
    rows = rows_of(record["means"], name, limits.num_classes * limits.per_class(entry))
    means = decoded(record["means"], f"{name} means", "float32", (rows, limits.width(entry)))
    labels = decoded(record["labels"], f"{name} labels", "int64", (rows,))
    counts = decoded(record["counts"], f"{name} counts", "int64", (rows,)) if entry.counts else None
    _check_vectors(means, labels, limits, limits.per_class(entry))
    if counts is not None and int(counts.min()) < 1:
        raise RefusedMessage("a count below 1")
    if entry.probabilities and not (bool((means >= 0).all()) and torch.allclose(means.sum(1), ONE, atol=1e-3)):
        raise RefusedMessage(f"{name} that are no class probabilities")
    return Prototypes(means, labels, counts)


def _bytes_of_vectors(name: str, entry: Vectors, limits: Limits) -> int:
    return limits.num_classes * limits.per_class(entry) * (4 * limits.width(entry) + 8 + 8 * entry.counts)


def _check_vectors(means: Tensor, labels: Tensor, limits: Limits, max_per_class: int) -> None:
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


def _shapes_of_table(name: str, entry: Vectors, limits: Limits) -> Shapes:
    return [("", (limits.num_classes, limits.width(entry) + 1))]


def _addends_of_vectors(name: str, value: Prototypes, entry: Vectors, limits: Limits, n: float) -> Iterator[Tensor]:
    means_PW = value.means.double().renorm(2, 0, 0.999999 * limits.max_norm).clamp(-LARGEST, LARGEST)
    k_P = torch.ones(len(value)) if value.counts is None else value.counts.clamp(max=int(MOST_SAMPLES))
    table_CW = torch.zeros(limits.num_classes, limits.width(entry) + 1, dtype=torch.float64)
    table_CW[value.labels] = k_P.double()[:, None] * torch.cat([means_PW, torch.ones(len(value), 1)], dim=1)
    yield table_CW


def _mean_of_vectors(
    name: str, arrays: StateDict, entry: Vectors, limits: Limits, n: float, clients: int
) -> Prototypes | None:
    sums_CW, k_C = arrays[""][:, :-1], arrays[""][:, -1]
    labels = (k_C != 0).nonzero().flatten()
    if not len(labels):
        return None
    means_PW, k_P = sums_CW[labels] / k_C[labels, None], k_C[labels]
    if bool((k_P < 1).any()):
        raise RefusedMessage(f"{name} of less than one sample of a class")
    if not entry.counts and (bool((k_P > clients).any()) or bool((k_P != k_P.round()).any())):
        raise RefusedMessage(f"{name} of a class from more than {clients} sites, or from a part of one")
    counts = k_P.round().long() if entry.counts else None
    return Prototypes(means_PW.float(), labels, counts)


# -- every client's vectors ----------------------------------------------------------------------------------------


def _pack_sets(name: str, value: tuple[Prototypes, ...], entry: VectorSets) -> ArrayRecord:
    owners = [torch.full((len(one),), index, dtype=torch.int64) for index, one in enumerate(value)]
    every = Prototypes.joined(value)
    return array_record({"means": every.means, "labels": every.labels, "owners": torch.cat(owners)})


def _unpack_sets(name: str, record: ArrayRecord, entry: VectorSets, limits: Limits) -> tuple[Prototypes, ...]:
    if set(record) != {"means", "labels", "owners"}:
        raise RefusedMessage(f"{name} with the arrays {sorted(record)} instead of ['labels', 'means', 'owners']")
    rows = rows_of(record["means"], name, limits.num_classes * MAX_SETS)
    means = decoded(record["means"], f"{name} means", "float32", (rows, limits.feature_dim))
    labels = decoded(record["labels"], f"{name} labels", "int64", (rows,))
    owners = decoded(record["owners"], f"{name} owners", "int64", (rows,))
    changes = owners.diff(prepend=owners.new_full((1,), -1))
    if not bool(((changes == 0) | (changes == 1)).all()):
        raise RefusedMessage(f"{name} whose owners are not numbered 0, 1, 2, … in order")
    sets = tuple(Prototypes(means[owners == one], labels[owners == one]) for one in owners.unique().tolist())
    for one in sets:
        _check_vectors(one.means, one.labels, limits, max_per_class=1)
    return sets


def _bytes_of_sets(name: str, entry: VectorSets, limits: Limits) -> int:
    return MAX_SETS * limits.num_classes * (4 * limits.feature_dim + 16)


# -- weights -------------------------------------------------------------------------------------------------------


def _pack_weights(name: str, value: StateDict, entry: Weights) -> ArrayRecord:
    if odd := [key for key in value if not key.startswith(entry.parts)]:
        raise ValueError(f"{name}.{odd[0]} is not declared for this direction; parts: {', '.join(entry.parts)}")
    return array_record(value)


def _unpack_weights(name: str, record: ArrayRecord, entry: Weights, limits: Limits) -> StateDict:
    template = limits.weights[name]
    if set(record) != set(template):
        odd = sorted(set(record) ^ set(template))
        raise RefusedMessage(f"{name} that do not fit the model: {', '.join(odd[:3])}{' …' if odd[3:] else ''}")
    found = {key: decoded(record[key], f"{name} {key}", dtype, shape) for key, (dtype, shape) in template.items()}
    if below := [key for key, value in found.items() if key.endswith(NOT_NEGATIVE) and (value < 0).any()]:
        raise RefusedMessage(f"{name} {below[0]}: below 0")
    return found


def _bytes_of_weights(name: str, entry: Weights, limits: Limits) -> int:
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in limits.weights[name].values())


def _shapes_of_weights(name: str, entry: Weights, limits: Limits) -> Shapes:
    return [(key, shape) for key, (_, shape) in sorted(limits.weights[name].items())]


def _addends_of_weights(name: str, value: StateDict, entry: Weights, limits: Limits, n: float) -> Iterator[Tensor]:
    for key in sorted(limits.weights[name]):
        yield n * value[key].detach().cpu().double().clamp(-LARGEST, LARGEST)


def _mean_of_weights(name: str, arrays: StateDict, entry: Weights, limits: Limits, n: float, clients: int) -> StateDict:
    dtypes = {key: getattr(torch, dtype) for key, (dtype, _) in limits.weights[name].items()}
    means = {key: arrays[key] / n for key in dtypes}
    whole = {key: mean if dtypes[key].is_floating_point else mean.round() for key, mean in means.items()}
    return {key: mean.to(dtypes[key]) for key, mean in whole.items()}


def _unpack_update(name: str, record: ArrayRecord, entry: Update, limits: Limits) -> StateDict:
    template = limits.weights[name]
    pairs = {key: {key + LEFT, key + RIGHT} for key, (dtype, _) in template.items() if dtype == "float32"}
    pairs = {key: pair for key, pair in pairs.items() if pair <= set(record)}
    rest = ArrayRecord({key: record[key] for key in set(record).difference(*pairs.values())})
    whole = {key: wanted for key, wanted in template.items() if key not in pairs}
    found = _unpack_weights(name, rest, entry, replace(limits, weights={name: whole}))
    found |= {key: _product(f"{name} {key}", record, key, template[key][1]) for key in pairs}
    return {key: found[key] for key in template}


def _unpack_moments(name: str, record: ArrayRecord, entry: Moments, limits: Limits) -> StateDict:
    found = _unpack_weights(name, record, entry, limits)
    if wrong := ClassMoments.of(found).problem():
        raise RefusedMessage(f"{name}: {wrong}")
    return found


def _product(what: str, record: ArrayRecord, key: str, shape: tuple[int, ...]) -> Tensor:
    rank = rows_of(record[key + RIGHT], f"factors of {what}", largest_rank(shape))
    left = decoded(record[key + LEFT], f"{what}{LEFT}", "float32", (shape[0], rank))
    right = decoded(record[key + RIGHT], f"{what}{RIGHT}", "float32", (rank, math.prod(shape[1:])))
    found = product(left, right, shape)
    if not found.isfinite().all():
        raise RefusedMessage(f"{what}: factors whose product is not finite")
    return found


# -- counts of classes ---------------------------------------------------------------------------------------------


def _pack_counts(name: str, value: Tensor, entry: Counts) -> ArrayRecord:
    return array_record({"counts": value})


def _unpack_counts(name: str, record: ArrayRecord, entry: Counts, limits: Limits) -> Tensor:
    if set(record) != {"counts"}:
        raise RefusedMessage(f"{name} with the arrays {sorted(record)} instead of ['counts']")
    counts = decoded(record["counts"], name, "int64", (limits.num_classes,))
    if int(counts.min()) < 0 or int(counts.max()) < 1:
        raise RefusedMessage(f"{name} below 0, or all 0")
    return counts


def _shapes_of_counts(name: str, entry: Counts, limits: Limits) -> Shapes:
    return [("", (limits.num_classes,))]


def _addends_of_counts(name: str, value: Tensor, entry: Counts, limits: Limits, n: float) -> Iterator[Tensor]:
    yield value.double().clamp(max=MOST_SAMPLES)


def _mean_of_counts(name: str, arrays: StateDict, entry: Counts, limits: Limits, n: float, clients: int) -> Tensor:
    return arrays[""].round().long()


def _bytes_of_counts(name: str, entry: Counts, limits: Limits) -> int:
    return 8 * limits.num_classes


def _no_sums(*_: Any) -> Any:
    raise ValueError("sums are of what clients upload after training")


@dataclass(frozen=True)
class Codec:
    """How one kind of entry travels, and how secure aggregation sums it (`privacy/sums.py`)."""

    pack: Callable[[str, Any, Any], ArrayRecord]
    unpack: Callable[[str, ArrayRecord, Any, Limits], Value]
    most_bytes: Callable[[str, Any, Limits], int]
    shapes: Callable[[str, Any, Limits], Shapes] = _no_sums
    """Names and shapes of the arrays that are summed."""
    addends: Callable[[str, Any, Any, Limits, float], Iterator[Tensor]] = _no_sums
    """These arrays of one client with n samples, bounded."""
    mean: Callable[[str, StateDict, Any, Limits, float, int], Value | None] = _no_sums
    """The entry of all clients together, from the sums; None for vectors of no class."""


_SUMS_OF_WEIGHTS = (_shapes_of_weights, _addends_of_weights, _mean_of_weights)
_CODECS: dict[type[Entry], Codec] = {
    Vectors: Codec(
        _pack_vectors, _unpack_vectors, _bytes_of_vectors, _shapes_of_table, _addends_of_vectors, _mean_of_vectors
    ),
    VectorSets: Codec(_pack_sets, _unpack_sets, _bytes_of_sets),
    Weights: Codec(_pack_weights, _unpack_weights, _bytes_of_weights, *_SUMS_OF_WEIGHTS),
    Update: Codec(_pack_weights, _unpack_update, _bytes_of_weights, *_SUMS_OF_WEIGHTS),
    Moments: Codec(_pack_weights, _unpack_moments, _bytes_of_weights, *_SUMS_OF_WEIGHTS),
    Counts: Codec(
        _pack_counts, _unpack_counts, _bytes_of_counts, _shapes_of_counts, _addends_of_counts, _mean_of_counts
    ),
    Statistics: Codec(
        lambda name, value, entry: pack_statistics(value, entry.level),
        lambda name, record, entry, limits: unpack_statistics(record, entry.level, limits),
        lambda name, entry, limits: bytes_of_statistics(entry.level, limits),
    ),
}


def codec_of(entry: Entry) -> Codec:
    """The codec of an entry's kind."""
    return _CODECS[type(entry)]
