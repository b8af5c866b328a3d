"""What a client may send, by algorithm: written a second time, by hand from the papers, to hold the catalog to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Declared:
    """The upload after training, beside the report."""

    prototypes: tuple[str, ...] = ()
    """Arrays of the record ``prototypes``; () for no such record."""
    weights: bool = False
    several: bool = False
    """A class may have several prototypes."""
    losses: tuple[str, ...] = ("cross-entropy",)

    @property
    def records(self) -> set[str]:
        """Names of the array records."""
        return {name for name, sent in (("prototypes", self.prototypes), ("weights", self.weights)) if sent}


PLAIN, COUNTED = ("means", "labels"), ("means", "labels", "counts")
DECLARED: dict[str, Declared] = {
    "local": Declared(),
    "fedavg": Declared(weights=True),
    "fedproto": Declared(COUNTED, losses=("cross-entropy", "prototype")),
    "fedtgp": Declared(PLAIN, losses=("cross-entropy", "prototype")),
    "fedpcl": Declared(COUNTED, losses=("contrast", "global", "local", "cross-entropy", "prototype")),
    "fedplvm": Declared(PLAIN, weights=True, several=True, losses=("cross-entropy", "contrast", "correction")),
    "protofed": Declared(PLAIN, weights=True),
    "fedproto-avg": Declared(COUNTED, weights=True, losses=("cross-entropy", "prototype")),
}
REPORT = ("round", "train_samples", "test_samples")
INFERENCES = ("head", "prototype")
PHASES = ("load", "evaluate", "train", "prototypes", "save")
SITE = {
    "name": str,
    "partition": int,
    "num_partitions": int,
    "domain": str,
    "arch": str,
    "input_shape": list,
    "parameters": int,
    "train_samples": int,
    "test_samples": int,
    "classes": list,
    "holds": list,
    "weights": str,
    "device": str,
}

INSIGHT: dict[str, tuple[str, ...]] = {
    "none": (),
    "summary": ("counts",),
    "features": ("counts", "features", "labels"),
}
"""Arrays of the record ``insight`` of the final evaluation, by level; with frozen backbones ``similarity`` too."""


def report_names(algo: str, training: bool) -> set[str]:
    """The names that a report may have."""
    losses = ("total", "unlabelled", *DECLARED[algo].losses) if training else ()
    groups = {"correct": INFERENCES, "seconds": PHASES, "losses": losses}
    return {*REPORT, *(f"{group}.{name}" for group, names in groups.items() for name in names)}
