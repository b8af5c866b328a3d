"""Statistics of a client's data for the run's report: what it may send, and when.

Three levels (setting ``statistics``), each with what the one before it has:

    ``none``      nothing
    ``summary``   how many training samples of each class it has; with frozen backbones, how much of its prototypes each
                  backbone alone explains (FedPCL, Figure 3)
    ``features``  up to `MAX_FEATURES` of its test features and their labels (FedTGP, Figure 6)

It is told once, in the reply to the final evaluation, never during training. The default is ``none``: several papers
promise that no class counts cross the wire, so a figure must not make them. In a simulation the report shows the
division of the data all the same: the server divides the data set once more by itself (`datasets/clients.py`).
A site with data of its own tells nothing, whatever the run asks for, unless its node config says ``statistics=true``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from protofl_common.basics.text import printable
from protofl_common.wire.arrays import array_record, decoded
from protofl_common.wire.limits import Limits, RefusedMessage

MAX_FEATURES = 200
"""Test samples of a client whose features may be told."""


@dataclass(frozen=True)
class ClientStatistics:
    """The statistics of one client."""

    counts: Tensor
    """[C] int64: labelled training samples of each class."""
    similarity: Tensor | None = None
    """[K] float32, in [-1, 1]: for each frozen backbone, how alike the prototypes of it alone and of all are."""
    features: Tensor | None = None
    """[N, D] float32: test samples in the space of the prototypes."""
    labels: Tensor | None = None
    """[N] int64: their classes."""


def pack_statistics(statistics: ClientStatistics, level: str) -> ArrayRecord:
    """Pack what ``level`` declares; ValueError if there is more."""
    given = {name: value for name, value in vars(statistics).items() if value is not None}
    if odd := sorted(given.keys() - _arrays_of(level, True)):
        raise ValueError(f"statistics.{odd[0]} is not declared for this direction (statistics = {level!r})")
    return array_record(given)


def _arrays_of(level: str, backbones: bool) -> set[str]:
    if level == "none":
        return set()
    arrays = {"counts", "features", "labels"} if level == "features" else {"counts"}
    return arrays | ({"similarity"} if backbones else set())


def unpack_statistics(record: ArrayRecord, level: str, limits: Limits) -> ClientStatistics:
    wanted = _arrays_of(level, limits.backbones > 0)
    if set(record) != wanted:
        raise RefusedMessage(f"statistics with the arrays {sorted(record)} instead of {sorted(wanted)}")
    counts = decoded(record["counts"], "statistics counts", "int64", (limits.num_classes,))
    if int(counts.min()) < 0:
        raise RefusedMessage("statistics counts below 0")
    similarity = features = labels = None
    if "similarity" in wanted:
        similarity = decoded(record["similarity"], "statistics similarity", "float32", (limits.backbones,))
        if float(similarity.abs().max()) > 1.001:
            raise RefusedMessage("statistics similarity outside -1..1")
    if "features" in wanted:
        rows = record["labels"].shape[0] if len(record["labels"].shape) else 0
        if type(rows) is not int or not 0 <= rows <= MAX_FEATURES:
            raise RefusedMessage(f"statistics of {printable(str(rows))} features, not from 0 to {MAX_FEATURES}")
        features = decoded(record["features"], "statistics features", "float32", (rows, limits.feature_dim))
        labels = decoded(record["labels"], "statistics labels", "int64", (rows,))
        if rows and not 0 <= int(labels.min()) <= int(labels.max()) < limits.num_classes:
            raise RefusedMessage(f"statistics label outside 0..{limits.num_classes - 1}")
        if rows and (norm := float(torch.linalg.vector_norm(features.double(), dim=1).max())) > limits.max_norm:
            raise RefusedMessage(f"statistics feature of norm {norm:.3g}, above {limits.max_norm:g}")
    return ClientStatistics(counts, similarity, features, labels)


def bytes_of_statistics(level: str, limits: Limits) -> int:
    """The most bytes that it can have."""
    counts = 0 if level == "none" else 8 * limits.num_classes + 4 * limits.backbones
    return counts + (MAX_FEATURES * (4 * limits.feature_dim + 8) if level == "features" else 0)
