"""The figures of reports as sums over the sites' samples: with secure aggregation nothing else of them leaves a site.

A figure f of n samples adds n · f and n. The server learns Σ n · f / Σ n, the mean over all samples of all sites.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from protofl_common.wire.limits import RefusedMessage
from protofl_common.wire.payloads import LARGEST, MOST_SAMPLES
from protofl_common.wire.records import ROUNDING, Report, is_share, report_names

Means = dict[str, dict[str, float]]
"""``correct``, ``metrics``, ``losses`` and ``validation`` -> each figure's mean over all samples."""


def figure_names(losses: Collection[str], metrics: Collection[str]) -> tuple[str, ...]:
    """``correct.head`` …: all figures that a report may hold, in the order in which they are summed."""
    groups = report_names(losses, metrics)
    return tuple(sorted(f"{group}.{name}" for group in groups.keys() - {"seconds"} for name in groups[group]))


def weighted_figures(report: Report, train_samples: int, names: Sequence[str]) -> NDArray[np.float64]:
    """n · f and n of each figure [2 F], zeros for a figure that this site does not have; bounded like an upload."""
    samples = {"losses": train_samples, "validation": report.validation_samples}
    addends = []
    for name in names:
        group, _, key = name.partition(".")
        figures, n = getattr(report, group), min(samples.get(group, report.test_samples), MOST_SAMPLES)
        share = figures.get(key, 0.0) / (max(1, report.test_samples) if group == "correct" else 1)
        addends += [n * np.clip(share, -LARGEST, LARGEST), n] if key in figures else [0.0, 0.0]
    return np.array(addends, dtype=np.float64)


def without_figures(report: Report) -> Report:
    """Return the part of the report that stays in the clear: the round, and how long it took."""
    return Report(report.round, 0, 0, seconds=report.seconds)


def means_of(sums: NDArray[np.float64], names: Sequence[str]) -> Means:
    """The means of the sums [2 F]; RefusedMessage where no honest sites can have such sums."""
    means: Means = {"correct": {}, "metrics": {}, "losses": {}, "validation": {}}
    for name, (total, n) in zip(names, sums.reshape(-1, 2).tolist(), strict=True):
        group, _, key = name.partition(".")
        if n < 0 or n != round(n) or (total and not n) or (group == "correct" and total != round(total)):
            raise RefusedMessage(f"a sum of {total:g} over {n:g} samples for {name}")
        if n and group != "losses" and is_share(key) and not 0 <= total / n <= 1 + ROUNDING:
            raise RefusedMessage(f"{name} of {total / n:g}, outside of 0 to 1")
        if n:
            means[group][key] = total / n
    return means
