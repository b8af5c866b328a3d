"""Using what a run has taught a site: its own model with the prototypes that predict, outside of any federation.

A client leaves a `TrainedModel` when it evaluates for the last time (`client_app/trained_model.py`); ``protofl export``
takes it out, and a `Predictor` predicts with it.
"""

from protofl_common.models.trained import ModelCard, TrainedModel
from protofl_common.tools.inference.predictor import Prediction, Predictor

__all__ = ["ModelCard", "Prediction", "Predictor", "TrainedModel"]
