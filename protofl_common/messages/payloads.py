"""What the algorithms exchange: prototypes and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from protofl_common.catalog import Crossing
from protofl_common.insight import MAX_FEATURES, Insight
from protofl_common.messages.arrays import DTYPES, array_record, decoded, dtype_name, rows_of
from protofl_common.messages.insights import pack_insight, unpack_insight
from protofl_common.messages.limits import Limits
from protofl_common.messages.refusal import RefusedMessage
from protofl_common.prototypes import Prototypes

MAX_SETS = 10_000
"""Clients whose prototypes a message may carry."""
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Payload:
    """What the algorithms exchange."""

    prototypes: Prototypes | None = None
    weights: Weights | None = None
    local_sets: tuple[Prototypes, ...] = ()
    """Every client's prototypes, in the order of the sites; none where they are not exchanged."""
    insight: Insight | None = None
    """What a client tells for the report; None from one that does not."""


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
        content["prototypes"] = array_record(arrays)
    if sets:
        owners = [torch.full((len(one),), index, dtype=torch.int64) for index, one in enumerate(sets)]
        means, labels = torch.cat([one.means for one in sets]), torch.cat([one.labels for one in sets])
        content["local-sets"] = array_record({"means": means, "labels": labels, "owners": torch.cat(owners)})
    if weights is not None:
        content["weights"] = array_record(weights)
    if payload.insight is not None:
        content["insight"] = pack_insight(payload.insight, crossing.insight)
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
        insight = unpack_insight(content.array_records["insight"], crossing.insight, limits)
    return Payload(prototypes, weights, sets, insight)


def check_size(content: RecordDict, crossing: Crossing, limits: Limits) -> None:
    """Refuse a message with more bytes than a valid one can have, before any of it is decoded or copied."""
    rows = limits.num_classes * (limits.max_per_class if crossing.many_per_class else 1)
    largest = rows * (4 * limits.feature_dim + 8 + 8 * crossing.counts) if crossing.prototypes else 0
    if crossing.local_sets:
        largest += MAX_SETS * limits.num_classes * (4 * limits.feature_dim + 16)
    if crossing.weights:
        largest += sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in limits.weights.values())
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
    return {name: (dtype_name(value), tuple(value.shape)) for name, value in weights.items()}


def _unpack_prototypes(record: ArrayRecord, crossing: Crossing, limits: Limits) -> Prototypes:
    wanted = {"means", "labels", "counts"} if crossing.counts else {"means", "labels"}
    if set(record) != wanted:
        raise RefusedMessage(f"prototypes with the arrays {sorted(record)} instead of {sorted(wanted)}")
    max_per_class = limits.max_per_class if crossing.many_per_class else 1
    rows = rows_of(record["means"], "prototypes", limits.num_classes * max_per_class)
    means = decoded(record["means"], "prototype means", "float32", (rows, limits.feature_dim))
    labels = decoded(record["labels"], "prototype labels", "int64", (rows,))
    counts = decoded(record["counts"], "prototype counts", "int64", (rows,)) if crossing.counts else None
    _check_prototypes(means, labels, limits, max_per_class)
    if counts is not None and int(counts.min()) < 1:
        raise RefusedMessage("a count below 1")
    return Prototypes(means, labels, counts)


def _unpack_sets(record: ArrayRecord, limits: Limits) -> tuple[Prototypes, ...]:
    if set(record) != {"means", "labels", "owners"}:
        raise RefusedMessage(f"local sets with the arrays {sorted(record)} instead of ['labels', 'means', 'owners']")
    rows = rows_of(record["means"], "local prototypes", limits.num_classes * MAX_SETS)
    means = decoded(record["means"], "local set means", "float32", (rows, limits.feature_dim))
    labels = decoded(record["labels"], "local set labels", "int64", (rows,))
    owners = decoded(record["owners"], "local set owners", "int64", (rows,))
    changes = owners.diff(prepend=owners.new_full((1,), -1))
    if not bool(((changes == 0) | (changes == 1)).all()):
        raise RefusedMessage("local sets whose owners are not numbered 0, 1, 2, … in order")
    sets = tuple(Prototypes(means[owners == one], labels[owners == one]) for one in owners.unique().tolist())
    for one in sets:
        _check_prototypes(one.means, one.labels, limits, max_per_class=1)
    return sets


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
        name: decoded(record[name], f"weights {name}", dtype, shape) for name, (dtype, shape) in limits.weights.items()
    }
