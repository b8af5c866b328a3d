"""The figures of the page, in its order: each function takes the run and returns its figures, [] where it has none."""

from __future__ import annotations

from collections.abc import Callable

from protofl_common.report.figures import accuracy, costs, distribution, embedding, margins, privacy, prototype_numbers
from protofl_common.report.figures.drawing import Drawing
from protofl_common.report.reading import Run

FIGURES: dict[str, tuple[Callable[[Run], list[Drawing]], ...]] = {
    "Accuracy": (accuracy.curves, accuracy.of_domains, accuracy.of_clients, accuracy.metrics, accuracy.losses),
    "Data": (distribution.bubbles,),
    "Prototypes": (
        margins.by_class,
        margins.over_rounds,
        embedding.prototypes,
        embedding.test_features,
        prototype_numbers.over_rounds,
        prototype_numbers.by_class,
        distribution.similarity,
    ),
    "Privacy in figures": (privacy.spent, privacy.inversions),
    "Traffic and time": (costs.traffic, costs.time),
}
"""Section -> its figures."""
