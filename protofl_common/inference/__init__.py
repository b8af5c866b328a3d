"""Using what a run has taught a site: its own model with the prototypes that predict, outside of any federation.

A client leaves a :class:`TrainedModel` when it evaluates for the last time (`client_app/handover.py`); ``protofl
export`` takes it out, and a :class:`Predictor` predicts with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protofl_common.lazy import from_homes

if TYPE_CHECKING:
    from protofl_common.inference.predictor import Prediction, Predictor
    from protofl_common.inference.trained import ModelCard, TrainedModel

UNKNOWN_SHARE = 0.05
"""Of inputs of the site's own kind, that may be called unknown unless told otherwise."""

__all__ = ["UNKNOWN_SHARE", "ModelCard", "Prediction", "Predictor", "TrainedModel"]

__getattr__ = from_homes(
    __name__,
    {
        "ModelCard": "protofl_common.inference.trained",
        "Prediction": "protofl_common.inference.predictor",
        "Predictor": "protofl_common.inference.predictor",
        "TrainedModel": "protofl_common.inference.trained",
    },
)
