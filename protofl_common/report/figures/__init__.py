"""The figures of the page, in its order: each function takes the run and yields its figures, none where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protofl_common.report.figures import accuracy, clouds, costs, prototypes
from protofl_common.report.figures.drawing import Drawing
from protofl_common.report.reading import Run

FIGURES: dict[str, tuple[Callable[[Run], Iterable[Drawing]], ...]] = {
    "Accuracy": (accuracy.curves, accuracy.of_domains, accuracy.of_clients, accuracy.metrics, accuracy.losses),
    "Data": (clouds.samples,),
    "Prototypes": (
        *(prototypes.margins_by_class, prototypes.margins_over_rounds),
        *(clouds.prototypes, clouds.test_features),
        *(prototypes.numbers_over_rounds, prototypes.numbers_by_class, prototypes.similarity),
    ),
    "Privacy in figures": (costs.spent, costs.inversions),
    "Traffic and time": (costs.traffic, costs.time),
}
"""Section -> its figures."""
