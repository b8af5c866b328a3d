"""What a client tells for the report (`protofl_common/wire/statistics.py`), as arrays of a message."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord

from protofl_common.basics.text import printable
from protofl_common.wire.arrays import array_record, decoded
from protofl_common.wire.limits import Limits, RefusedMessage
from protofl_common.wire.statistics import MAX_FEATURES, Insight


def pack_insight(insight: Insight, level: str) -> ArrayRecord:
    """What ``level`` declares of it; ValueError if it tells more."""
    given = {name: value for name, value in vars(insight).items() if value is not None}
    if odd := sorted(given.keys() - _arrays_of(level, True)):
        raise ValueError(f"insight.{odd[0]} is not declared for this direction (insight = {level!r})")
    return array_record(given)


def _arrays_of(level: str, backbones: bool) -> set[str]:
    if level == "none":
        return set()
    arrays = {"counts", "features", "labels"} if level == "features" else {"counts"}
    return arrays | ({"similarity"} if backbones else set())


def unpack_insight(record: ArrayRecord, level: str, limits: Limits) -> Insight:
    wanted = _arrays_of(level, limits.backbones > 0)
    if set(record) != wanted:
        raise RefusedMessage(f"an insight with the arrays {sorted(record)} instead of {sorted(wanted)}")
    counts = decoded(record["counts"], "insight counts", "int64", (limits.num_classes,))
    if int(counts.min()) < 0:
        raise RefusedMessage("insight counts below 0")
    similarity = features = labels = None
    if "similarity" in wanted:
        similarity = decoded(record["similarity"], "insight similarity", "float32", (limits.backbones,))
        if float(similarity.abs().max()) > 1.001:
            raise RefusedMessage("an insight similarity outside -1..1")
    if "features" in wanted:
        rows = record["labels"].shape[0] if len(record["labels"].shape) else 0
        if type(rows) is not int or not 0 <= rows <= MAX_FEATURES:
            raise RefusedMessage(f"an insight of {printable(str(rows))} features, not from 0 to {MAX_FEATURES}")
        features = decoded(record["features"], "insight features", "float32", (rows, limits.feature_dim))
        labels = decoded(record["labels"], "insight labels", "int64", (rows,))
        if rows and not 0 <= int(labels.min()) <= int(labels.max()) < limits.num_classes:
            raise RefusedMessage(f"an insight label outside 0..{limits.num_classes - 1}")
        if rows and (norm := float(torch.linalg.vector_norm(features.double(), dim=1).max())) > limits.max_norm:
            raise RefusedMessage(f"an insight feature of norm {norm:.3g}, above {limits.max_norm:g}")
    return Insight(counts, similarity, features, labels)


def bytes_of_insight(level: str, limits: Limits) -> int:
    """The most bytes that it can have."""
    counts = 0 if level == "none" else 8 * limits.num_classes + 4 * limits.backbones
    return counts + (MAX_FEATURES * (4 * limits.feature_dim + 8) if level == "features" else 0)
