"""Few labels (``positive-rate`` below 1): what any algorithm trains on then, and FedPU's term for the rest.

Source: "Federated Learning with Positive and Unlabeled Data" (Lin et al., ICML 2022), as our text uses it (Section
5.4); the risk itself is `losses/positive_unlabelled.py`.
"""

from __future__ import annotations

from client_app.data import Samples
from client_app.training import Batch, Loss, LossTerms
from protofl_common.config.sections import TrainingSettings
from protofl_common.data import UNLABELLED
from protofl_common.maths.losses.positive_unlabelled import positive_unlabelled_risk


def training_set(data: Samples, settings: TrainingSettings) -> Samples:
    """Return the samples that batches are drawn from: the labelled ones and, with ``pu-weight``, the unlabelled."""
    return data.with_unlabelled() if settings.pu_weight > 0 else data


def labelled_loss(loss: Loss, data: Samples, settings: TrainingSettings, num_classes: int) -> Loss:
    """``loss`` of the labelled samples of a batch and, with ``pu-weight``, FedPU's risk of the unlabelled ones.

    Where all samples have labels, it is ``loss`` itself. No terms mean that there is nothing to learn.
    """
    hidden = data.unlabelled
    if hidden is None:
        return loss
    counts_C = data.labels.bincount(minlength=num_classes)

    def both(batch: Batch) -> LossTerms:
        known_B = batch.labels != UNLABELLED
        terms = loss(batch.only(known_B)) if bool(known_B.any()) else {}
        if settings.pu_weight > 0:
            bounded = settings.pu_risk == "non-negative"
            risk = positive_unlabelled_risk(batch.logits, batch.labels, counts_C, len(hidden), bounded)
            terms["unlabelled"] = settings.pu_weight * risk
        return terms

    return both
