"""Metrics beside accuracy, computed by each client on its own test samples.

Only the figures travel. The setting ``metrics`` names them; where classes are uneven, simulated
clients add balanced accuracy. One of the user's own is ``module:function``, called with scores [N,
C] (higher is likelier; for prototypes −d², and a very low one for a class without any) and labels
[N] int64; it returns a number; one that is NaN or infinite is left out. Where a sample has several
labels, scores are [N, L], above 0 for a label that is predicted, and labels [N, L] 1, 0 or -1.
"""

import math
import statistics
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.lists import names_in
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import is_python_name, load
from protofl_common.config.sections import FEWEST_TESTED

Scores = NDArray[np.float64]
Labels = NDArray[np.int64]
Metric = Callable[[Scores, Labels], float]

KINDS = ("prototype", "head")  # ways to predict, of which a run may have both


def recalls(scores_NC: Scores, labels_N: Labels) -> dict[str, float]:
    """Return the recall of each class that occurs, a figure for each: `recall/3` of class 3."""
    hits_N = scores_NC.argmax(1) == labels_N
    return {
        f"{RECALL}/{label}": float(hits_N[labels_N == label].mean())
        for label in np.unique(labels_N)
    }


def balanced_accuracy(scores_NC: Scores, labels_N: Labels) -> float:
    """Return the mean recall of the classes that occur."""
    return statistics.fmean(recalls(scores_NC, labels_N).values())


def macro_f1(scores_NC: Scores, labels_N: Labels, classes: Labels | None = None) -> float:
    """Return the mean F1 of the classes that occur or are predicted.

    If ``classes`` are given, it is the mean over these instead.
    """
    from sklearn.metrics import f1_score

    predicted_N = scores_NC.argmax(1)
    f1 = f1_score(labels_N, predicted_N, labels=classes, average="macro", zero_division=0.0)
    return float(f1)


def macro_f1_of_tested(scores_NC: Scores, labels_N: Labels) -> float:
    """Return the mean F1 of the classes that occur.

    A class that is only predicted does not count. If it did, a single sample that is predicted as
    such a class would add a class to the mean, and the server could see that from the figure.
    """
    return macro_f1(scores_NC, labels_N, np.unique(labels_N))


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
MACRO_F1 = "macro-f1"
AUC = "auc"
METRICS: dict[str, Metric] = {BALANCED: balanced_accuracy, MACRO_F1: macro_f1, AUC: auc}
METRICS_OF_TESTED = METRICS | {MACRO_F1: macro_f1_of_tested}
"""Those that are rounded before they leave a site (`rounded_metrics`)."""
CLASSES_MOVED = {AUC: 2, MACRO_F1: 3}
"""How far one sample moves a mean over C classes, in 1 / (C N_c): 1, unless a metric stands here.

In an AUC a sample is also a negative of the other classes; in an F1 it may be found no more, which
moves the F1 of its class by 2 / N_c at most, and be a false one of another class.
"""
RECALL = "recall"  # names not one figure but one of each class that occurs: `recall/3`


def _labels_to_rank(
    scores_NL: Scores, labels_NL: Labels
) -> Iterator[tuple[int, Scores, NDArray[np.bool_]]]:
    """Yield for each label its number, scores [K], and whether samples have it, bool [K].

    K are the samples of which the label is known. Labels that all or none of them have are left
    out: no ranking of the samples can be right or wrong.
    """
    for label, labels_N in enumerate(labels_NL.T):
        is_known_N = labels_N >= 0
        holds_K = labels_N[is_known_N] == 1
        if holds_K.any() and not holds_K.all():
            yield label, scores_NL[is_known_N, label], holds_K


def _by_label(
    name: str,
    metric: Callable[[NDArray[np.bool_], Scores], float],
    scores_NL: Scores,
    labels_NL: Labels,
) -> dict[str, float]:
    """Return a metric of each label that some samples have and some lack: ``name/7`` of label 3.

    Figures by class are named by classes. A label has two (`MultiLabel`): 2 · label of the samples
    without it, and 2 · label + 1 of those with it, by which its figures are named. ``metric`` is
    called with whether samples have the label, and their scores, both [K], for the K samples of
    which the label is known.
    """
    return {
        f"{name}/{2 * label + 1}": float(metric(holds_K, scores_K))
        for label, scores_K, holds_K in _labels_to_rank(scores_NL, labels_NL)
    }


def _mean_over_labels(
    metric: Callable[[NDArray[np.bool_], Scores], float], scores_NL: Scores, labels_NL: Labels
) -> float:
    """Return the mean of a metric over the labels that some samples have and some lack.

    NaN if there are none.
    """
    values = _by_label("", metric, scores_NL, labels_NL).values()
    return statistics.fmean(values) if values else math.nan


def auc_of_labels(scores_NL: Scores, labels_NL: Labels) -> float:
    """Return the mean area under the ROC curve of each label that some have and some lack."""
    from sklearn.metrics import roc_auc_score

    return _mean_over_labels(roc_auc_score, scores_NL, labels_NL)


def average_precision(scores_NL: Scores, labels_NL: Labels) -> float:
    """Return the mean average precision of each label that some have and some lack."""
    from sklearn.metrics import average_precision_score

    return _mean_over_labels(average_precision_score, scores_NL, labels_NL)


def f1_of_labels(scores_NL: Scores, labels_NL: Labels) -> float:
    """Return the mean F1 of each label that some have and some lack.

    A label is predicted above the threshold that validation data have chosen (`best_thresholds`);
    without such data, and on these themselves, at probability one half.
    """

    def f1(holds_K: NDArray[np.bool_], scores_K: Scores) -> float:
        predicted_K = scores_K > 0  # scikit-learn's f1_score takes two milliseconds a label
        right = (predicted_K & holds_K).sum()
        return float(2 * right / (predicted_K.sum() + holds_K.sum()))

    return _mean_over_labels(f1, scores_NL, labels_NL)


def auc_by_label(scores_NL: Scores, labels_NL: Labels) -> dict[str, float]:
    """Return the area under the ROC curve of each label: `label-auc/7` of label 3 (2 · 3 + 1)."""
    from sklearn.metrics import roc_auc_score

    return _by_label(LABEL_AUC, roc_auc_score, scores_NL, labels_NL)


def auc_errors_by_label(scores_NL: Scores, labels_NL: Labels) -> dict[str, float]:
    """Return the standard error of each label's AUC: 1.96 of it on both sides are a 95 % interval.

    DeLong et al. 1988, by ranks (Sun and Xu 2014).
    NaN if only one sample has the label, or lacks it.
    """
    return _by_label(LABEL_AUC_ERROR, _auc_error, scores_NL, labels_NL)


def _auc_error(holds_K: NDArray[np.bool_], scores_K: Scores) -> float:
    """Return the standard error of the AUC of a label that ``holds_K`` for some of K samples.

    By DeLong et al. (1988): the AUC is the mean share of samples without the label that a sample
    with it scores above. These shares vary from sample to sample, as do those of the samples
    without the label, and both variances add up. NaN if fewer than two samples have the label, or
    lack it, as a variance needs two.
    """
    from scipy.stats import rankdata

    with_label = scores_K[holds_K]
    without_label = scores_K[~holds_K]
    m, n = len(with_label), len(without_label)
    if min(m, n) < 2:
        return math.nan
    ranks_K = rankdata(scores_K)
    # A sample's rank among all, less its rank among its own kind, is the number of samples of the
    # other kind that score less (a tie counts one half).
    # of each sample with the label: the share of those without it that score less
    shares_below = (ranks_K[holds_K] - rankdata(with_label)) / n
    # of each sample without the label: the share of those with it that score more
    shares_above = 1 - (ranks_K[~holds_K] - rankdata(without_label)) / m
    return math.sqrt(shares_below.var(ddof=1) / m + shares_above.var(ddof=1) / n)


LARGEST_SCORE = 1e30  # stands for infinity, and for the score of which one class is not known


def best_thresholds(scores_NL: Scores, labels_NL: Labels) -> Scores:
    """Return for each label the score above which predicting it has the best F1, [L].

    0, probability one half, for a label that all known samples have, or lack.
    """
    thresholds_L = np.zeros(scores_NL.shape[1])
    for label, scores_K, holds_K in _labels_to_rank(scores_NL, labels_NL):
        order = np.argsort(-scores_K, kind="stable")
        descending_K = scores_K[order]
        # entry k of the following is for the label predicted of the k + 1 highest scores
        predicted_K = np.arange(1, len(order) + 1)
        right_K = holds_K[order].cumsum()
        f1_K = 2 * right_K / (predicted_K + holds_K.sum())
        next_K = np.append(descending_K[1:], descending_K[-1] - 1)  # below the last: predict all
        is_possible_K = next_K < descending_K  # no threshold lies between equal scores
        best = np.where(is_possible_K, f1_K, -1).argmax()
        upper = descending_K[best]
        lower = next_K[best]
        # a score that stands for infinity says nothing of the distance of the threshold
        if upper >= LARGEST_SCORE:
            upper = next_K[best] + 1
        if lower <= -LARGEST_SCORE:
            lower = descending_K[best] - 1
        thresholds_L[label] = (upper + lower) / 2
    return thresholds_L


LABEL_AUC = "label-auc"  # names one figure of each label: `label-auc/7`, of the class 7
LABEL_AUC_ERROR = "label-auc-error"
LABEL_METRICS: dict[str, Metric] = {
    "auc": auc_of_labels,
    "average-precision": average_precision,
    "macro-f1": f1_of_labels,
}
BY_CLASS: dict[str, Callable[[Scores, Labels], dict[str, float]]] = {
    RECALL: recalls,
    LABEL_AUC: auc_by_label,
    LABEL_AUC_ERROR: auc_errors_by_label,
}
"""Metrics that are a figure of each class."""


def metric_names(text: str, legal: Collection[str]) -> tuple[str, ...]:
    """Read the setting ``metrics``; SettingsError for what is neither ``legal`` nor a function."""
    names = names_in(text)
    for name in names:
        if name not in legal and not is_python_name(name):
            choices = ", ".join(legal)
            raise SettingsError(
                f"metrics = {text!r}: {name!r} is not one of {choices}, or module:function"
            )
    return names


def evaluate_metrics(
    names: Iterable[str], metrics: Mapping[str, Metric], scores_NC: Scores, labels_N: Labels
) -> dict[str, float]:
    """Compute these metrics; those that are NaN or infinite are left out, {} without samples.

    ``metrics`` are those of the task, by name. SettingsError if a function of the user's fails.
    """
    if not len(labels_N):
        return {}
    figures: dict[str, float] = {}
    for name in names:
        if name in BY_CLASS:
            figures |= BY_CLASS[name](scores_NC, labels_N)
        elif name in metrics:
            figures[name] = metrics[name](scores_NC, labels_N)
        else:
            figures[name] = _users_metric(name, scores_NC, labels_N)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


# -- of enough test samples
def tested_classes(labels_N: Labels, least: int) -> Labels:
    """Return the labels of the classes of which metrics may leave the site.

    With a ``least`` of 1 these are all that occur. Else each has at least ``least`` test samples,
    and at least `FEWEST_TESTED`. The other classes together must have as many, if there are any:
    fewer would show in the number of right predictions of all classes. Where they have fewer, the
    smallest of the large classes is left out, too.
    """
    fewest = max(least, FEWEST_TESTED) if least > 1 else 1
    labels, counts = np.unique(labels_N, return_counts=True)
    large = counts >= fewest
    if 0 < counts[~large].sum() < fewest:
        counts_of_large = np.where(large, counts, counts.max() + 1)  # no other is the smallest
        large[counts_of_large.argmin()] = False
    return np.asarray(labels[large])


def rounded_metrics(figures: Mapping[str, float], labels_N: Labels, least: int) -> dict[str, float]:
    """Round each metric of samples with these labels to a multiple of what ``least`` samples add.

    One of the N_c samples of a class adds at most 1 / N_c to the recall of the class. To any other
    metric, a mean over C classes, it adds at most 1 / (C N_c), with the smallest class for c, or
    several times that (`CLASSES_MOVED`).
    """
    if least <= 1:
        return dict(figures)
    labels, counts = np.unique(labels_N, return_counts=True)
    samples_of = {f"{RECALL}/{label}": n for label, n in zip(labels, counts, strict=True)}
    rounded: dict[str, float] = {}
    for name, value in figures.items():
        samples_of_mean = len(counts) * counts.min()  # C N_c of the smallest class
        step = least * CLASSES_MOVED.get(name, 1) / float(samples_of.get(name, samples_of_mean))
        rounded[name] = to_step(value, step)
    return rounded


def to_step(value: float, step: float) -> float:
    """Round a figure to a multiple of ``step``; rounding lifts no share above 1."""
    nearest = step * round(value / step)
    return min(1.0, nearest) if value <= 1 else nearest  # a user's metric may be above 1


def _users_metric(name: str, scores_NC: Scores, labels_N: Labels) -> float:
    """Call the user's function ``name``, ``module:function``, with arrays that it may change.

    The text of an error may quote samples, so it goes to the client's log; SettingsError, which the
    server gets, has its type alone.
    """
    metric: Metric = load(name, "metrics")
    try:
        # other metrics, and the next evaluation, shall have what the function had
        return float(metric(scores_NC.copy(), labels_N.copy()))
    except Exception as error:  # a user's function may raise anything
        traceback.print_exception(error)
        kind = type(error).__name__
        raise SettingsError(
            f"metrics = {name!r}: it failed ({kind}); the log of the client says more"
        ) from error
