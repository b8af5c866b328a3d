"""Using what a run has taught a site: its own model with the prototypes that predict, outside of any federation.

A client leaves a :class:`TrainedModel` when it evaluates for the last time (`client_app/handover.py`); ``protofl
export`` takes it out, and a :class:`Predictor` predicts with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protofl_common.inference.predictor import Prediction, Predictor
    from protofl_common.inference.trained import ModelCard, TrainedModel

__all__ = ["ModelCard", "Prediction", "Predictor", "TrainedModel"]

_HOMES = {
    "ModelCard": "protofl_common.inference.trained",
    "Prediction": "protofl_common.inference.predictor",
    "Predictor": "protofl_common.inference.predictor",
    "TrainedModel": "protofl_common.inference.trained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
