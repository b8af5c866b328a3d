"""Using what a run has left at a site: its model, and the prototypes that predict, outside of any federation."""

from protofl_common.models.trained import ModelCard, TrainedModel
from protofl_common.tools.inference.predictor import Prediction, Predictor

__all__ = ["ModelCard", "Prediction", "Predictor", "TrainedModel"]
