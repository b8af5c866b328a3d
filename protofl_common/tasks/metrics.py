"""Metrics of single labels beside accuracy, computed by each client on its own test samples.

Only the figures travel. The setting ``metrics`` names them; where classes are uneven, simulated
clients add balanced accuracy. One of the user's own is ``module:function``, called with scores [N,
C] (higher is likelier; for prototypes −d², and a very low one for a class without any) and labels
[N] int64; it returns a number; one that is NaN or infinite is left out.
"""

import math
import statistics
import traceback
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import is_python_name, load
from protofl_common.runs.folder import KINDS

Scores = NDArray[np.float64]
Labels = NDArray[np.int64]
Metric = Callable[[Scores, Labels], float]


def recalls(scores_NC: Scores, labels_N: Labels) -> dict[str, float]:
    """Return the recall of each class that occurs in ``labels_N``: ``recall/3`` of class 3."""
    hits_N = scores_NC.argmax(1) == labels_N
    return {
        f"{RECALL}/{label}": float(hits_N[labels_N == label].mean())
        for label in np.unique(labels_N)
    }


def balanced_accuracy(scores_NC: Scores, labels_N: Labels) -> float:
    """Return the mean recall of the classes that occur."""
    return statistics.fmean(recalls(scores_NC, labels_N).values())


def macro_f1(scores_NC: Scores, labels_N: Labels) -> float:
    """Return the mean F1 of the classes that occur or are predicted."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels_N, scores_NC.argmax(1), average="macro", zero_division=0.0))


def auc(scores_NC: Scores, labels_N: Labels) -> float:
    """Return the mean, over the classes that occur, of the area under the ROC curve.

    For each class samples are ranked by its log odds against all others: score − log Σ exp(other
    scores). That is the order of its softmax probabilities, which may be rounded to 0 or 1. NaN if
    only one class occurs.
    """
    from sklearn.metrics import roc_auc_score

    present = np.unique(labels_N)
    if len(present) < 2:
        return math.nan
    areas = []
    for label in present:
        others_N = np.logaddexp.reduce(np.delete(scores_NC, label, axis=1), axis=1)
        areas.append(roc_auc_score(labels_N == label, scores_NC[:, label] - others_N))
    return float(np.mean(areas))


BALANCED = "balanced-accuracy"
METRICS: dict[str, Metric] = {BALANCED: balanced_accuracy, "macro-f1": macro_f1, "auc": auc}
RECALL = "recall"  # names not one figure but one of each class that occurs: `recall/3`


def metric_names(text: str) -> tuple[str, ...]:
    """Read the setting ``metrics``; SettingsError for a name that is no metric, nor a function."""
    names = names_in(text)
    legal = [*METRICS, RECALL]
    for name in names:
        if name not in legal and not is_python_name(name):
            choices = ", ".join(legal)
            raise SettingsError(
                f"metrics = {text!r}: {name!r} is not one of {choices}, or module:function"
            )
    return names


def declared_metrics(names: Iterable[str], num_classes: int) -> set[str]:
    """Return all that a report may hold for these metrics: ``head/auc``, ``prototype/recall/3``."""
    metrics = []
    for name in names:
        if name == RECALL:
            metrics += [f"{RECALL}/{label}" for label in range(num_classes)]
        else:
            metrics.append(name)
    return {f"{kind}/{metric}" for kind in KINDS for metric in metrics}


def evaluate_metrics(names: Iterable[str], scores_NC: Scores, labels_N: Labels) -> dict[str, float]:
    """Compute these metrics; those that are NaN or infinite are left out, {} without samples.

    SettingsError if a function of the user's fails.
    """
    if not len(labels_N):
        return {}
    figures: dict[str, float] = {}
    for name in names:
        if name == RECALL:
            figures |= recalls(scores_NC, labels_N)
        elif name in METRICS:
            figures[name] = METRICS[name](scores_NC, labels_N)
        else:
            figures[name] = _users_metric(name, scores_NC, labels_N)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _users_metric(name: str, scores_NC: Scores, labels_N: Labels) -> float:
    """Call the user's function ``name``, ``module:function``.

    The text of an error may quote samples, so it goes to the client's log; SettingsError, which the
    server gets, has its type alone.
    """
    metric: Metric = load(name, "metrics")
    try:
        return float(metric(scores_NC, labels_N))
    except Exception as error:  # a user's function may raise anything
        traceback.print_exception(error)
        kind = type(error).__name__
        raise SettingsError(
            f"metrics = {name!r}: it failed ({kind}); the log of the client says more"
        ) from error
