"""A task by hand: what a label is, and its metrics."""

import sys
from itertools import combinations
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from client_app.learning.data import Samples
from client_app.learning.evaluation import _finite, evaluate
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow
from protofl_common.models.split import SplitModel
from protofl_common.tasks import task_of
from protofl_common.tasks.metrics import (
    METRICS,
    evaluate_metrics,
    metric_names,
)


def test_one_label_a_sample():
    """There are two samples of "b" and one of "a", a prototype of "a" and two of "b".

    The score of a class is minus the squared distance to its nearest prototype; "c" has none.
    """
    task = task_of(["a", "b", "c"])
    labels = task.tensor(np.array([1, 0, 1], np.int8))
    assert (labels.dtype, task.num_classes, task.num_outputs) == (torch.int64, 3, 3)
    assert task.names(labels) == ["b", "a", "b"]
    assert task.class_counts(labels).tolist() == [1, 2, 0]
    features, classes = task.assigned(torch.eye(3), labels)
    assert features.equal(torch.eye(3))
    assert classes.equal(labels)
    assert task.labels_of(classes).equal(labels)

    distances = torch.tensor([[1.0, 2, 3], [1, 2, 3], [3, 2, 1]])
    classes_of_prototypes = torch.tensor([0, 1, 1])
    nearest = task.nearest(distances, classes_of_prototypes)
    assert nearest.tolist() == [0, 0, 1]
    assert int(task.correct(nearest, labels)) == 2
    scores = task.scores(distances, classes_of_prototypes)
    assert scores[:, 2].tolist() == [-torch.inf] * 3
    assert task.predicted(scores).equal(nearest)
    likelihood = 1 / (1 + np.exp(-3.0))  # of −1 against −4
    assert task.probabilities(scores, nearest)[0] == pytest.approx(likelihood)
    # scores of a and b: −1 and −4 twice, then −9 and −1
    losses = [-np.log(1 - likelihood), -np.log(likelihood), np.log(1 + np.exp(-8.0))]
    assert float(task.loss(scores[:, :2], labels)) == pytest.approx(np.mean(losses), rel=1e-5)


def test_several_labels_a_sample():
    """The first sample has label a, lacks b, and of c it is not known (-1); and so on.

    Each label makes two classes: 2 l for "no label l", 2 l + 1 for "label l".
    """
    task = task_of(["a", "b", "c"], "multi-label")
    labels = torch.tensor([[1, 0, -1], [0, -1, 1]])
    assert (task.num_classes, task.num_outputs, task.classes_of_a_sample) == (6, 3, 3)
    assert task.class_names == ("no a", "a", "no b", "b", "no c", "c")
    assert task.names(labels) == ["a", "c"]
    features, classes = task.assigned(torch.eye(2), labels)
    assert features.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert classes.tolist() == [1, 2, 0, 5]
    assert task.class_counts(labels).tolist() == [1, 1, 1, 0, 0, 1]
    assert task.labels_of(classes[:2]).tolist() == [[1, -1, -1], [-1, 0, -1]]
    assert task.rivals(classes, torch.tensor([0, 1, 4])).tolist() == [
        [True, True, False],
        [False, False, False],
        [True, True, False],
        [False, False, True],
    ]
    assert task.strata(np.array([[1, 0, -1], [0, 0, 0], [1, 1, 0]])).tolist() == [0, 3, 1]

    outputs = torch.tensor([[2.0, -1, 50], [0, 50, 1]])  # 50 where the label is not known
    losses = [  # −log of the probability of each known label, by the logistic function
        np.log1p(np.exp(-2)),
        np.log1p(np.exp(-1)),
        np.log(2),
        np.log1p(np.exp(-1)),
    ]
    assert float(task.loss(outputs, labels)) == pytest.approx(np.mean(losses))
    predicted = task.predicted(outputs)
    assert int(task.correct(predicted, labels)) == 2
    least_certain = [1 / (1 + np.exp(-1)), 0.5]  # of the outputs −1 and 0
    assert task.probabilities(outputs, predicted).tolist() == pytest.approx(least_certain)

    # prototypes of "no a", "a" and "b" alone: nothing is known against b, and nothing for c
    nearest = task.nearest(torch.tensor([[1.0, 2, 9], [2, 1, 9]]), torch.tensor([0, 1, 3]))
    assert nearest.tolist() == [[0, 1, 0], [1, 1, 0]]


def test_metrics_of_several_labels_by_hand():
    """Four samples have labels a, b and c, 1 for yes, 0 for no, -1 for unknown."""
    task = task_of(["a", "b", "c"], "multi-label")
    scores = np.array([[1.0, 0, 0], [2, 0, 0], [3, 0, 1], [-1, 1, 1]])
    truth = np.array([[0, 1, -1], [1, 1, 0], [-1, 0, 0], [1, -1, 0]])
    by_hand = {  # means over the labels a and b
        "auc": (0.5 + 0.5) / 2,  # nobody is known to have c
        "average-precision": ((1 + 2 / 3) / 2 + 2 / 3) / 2,
        "macro-f1": (2 * 1 / 4 + 0) / 2,
    }
    assert by_hand.keys() == task.metrics.keys()
    figures = task.figures([*by_hand, "label-auc"], scores, truth)
    wanted = {**by_hand, "label-auc/1": 0.5, "label-auc/3": 0.5}
    assert figures == {name: pytest.approx(value) for name, value in wanted.items()}
    assert {f"head/{name}" for name in figures} <= task.figure_names([*by_hand, "label-auc"])
    # of no label there are twenty samples with it, and twenty without it
    assert task.figures(by_hand, scores, truth, least=2) == {}


def test_no_sum_over_labels_tells_of_few_samples():
    """No combination of the sums over classes that are kept is a sum over 1 or 2 samples alone.

    ``sums`` has a row for each group of equal samples: which classes they add to. If some groups
    of fewer than 3 samples together were told apart, the rank would fall without their rows.
    """
    task = task_of(["a", "b", "c"], "multi-label")
    rng = np.random.default_rng(5)
    kept = []
    for _ in range(60):
        labels = rng.choice([-1, 0, 1], p=[0.1, 0.6, 0.3], size=(40, 3))
        classes = task.large_classes(labels, 3)
        kept.append(len(classes))
        left = task.only_of(labels, classes)
        groups, counts = np.unique(left, axis=0, return_counts=True)
        sums = np.stack([groups[:, c // 2] == c % 2 for c in range(6)], 1)[:, classes] * 1.0
        rank = np.linalg.matrix_rank(sums) if len(classes) else 0
        small = np.flatnonzero(counts < 3)
        for number in range(1, len(small) + 1):
            for hidden in combinations(small, number):
                if len(classes) and counts[list(hidden)].sum() < 3:
                    others = np.delete(sums, hidden, axis=0)
                    assert np.linalg.matrix_rank(others) == rank
    assert {0, 2, 4, 6} >= set(kept)  # both classes of a label, or neither
    assert len(set(kept)) > 1


def test_a_label_of_few_samples_is_small_on_both_sides():
    """Two samples have label b, fewer than 3: it becomes unknown to all ten."""
    task = task_of(["a", "b"], "multi-label")
    labels = np.array([[1, 0]] * 4 + [[0, 0]] * 4 + [[0, 1]] * 2)
    assert task.large_classes(labels, 3).tolist() == [0, 1]
    assert task.only_of(labels, np.array([0, 1]))[:, 1].tolist() == [-1] * 10


SCORES = np.array([[3.0, 1.0, 0.0], [2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [2.0, 1.0, 0.0]])
LABELS = np.array([0, 0, 1, 1])
"""Predicted 0, 0, 1, 0; nobody is of class 2.

Class 0 has recall 1 and precision 2/3, class 1 recall 1/2 and precision 1.
"""

# The share of pairs (class 0, class 1) in which the right one's probability is larger; a tie
# counts half.
AUC_OF_0 = (2 + 1.5) / 4
AUC_OF_1 = (2 + 1 + 0.5) / 4  # 0.67 beats both; 0.24 beats 0.11, and ties with 0.24
AUC = (AUC_OF_0 + AUC_OF_1) / 2


def test_every_metric_by_hand():
    """`SCORES` and `LABELS` are four samples of two classes among three."""
    f1_of_0 = 2 * (2 / 3) * 1 / (2 / 3 + 1)  # 2 · precision · recall / (precision + recall)
    f1_of_1 = 2 * 1 * (1 / 2) / (1 + 1 / 2)
    by_hand = {
        "balanced-accuracy": pytest.approx((1 + 1 / 2) / 2),  # the mean recall
        "macro-f1": pytest.approx((f1_of_0 + f1_of_1) / 2),
        "auc": pytest.approx(AUC),
    }
    assert by_hand.keys() == METRICS.keys()
    recalls = {"recall/0": 1.0, "recall/1": 0.5}
    assert evaluate_metrics([*METRICS, "recall"], METRICS, SCORES, LABELS) == by_hand | recalls


def test_auc_is_of_the_order_of_probabilities():
    """Scores that give the same order of each class's probabilities have the same AUC."""

    def auc(scores):
        return evaluate_metrics(["auc"], METRICS, scores, LABELS)["auc"]

    shift_of_each_sample = np.array([[9.0], [-9], [40], [0]])  # which changes no probability
    assert auc(SCORES + shift_of_each_sample) == pytest.approx(AUC)
    assert auc(900 * SCORES) == pytest.approx(AUC)  # rounded to 0 and 1, they keep their order

    # class 1 has no prototype, so that its probability is 0 everywhere
    without_class_1 = torch.tensor(SCORES)
    without_class_1[:, 1] = -torch.inf
    assert auc(_finite(without_class_1)) == pytest.approx(((1.5 + 2) / 4 + 0.5) / 2)


def test_a_metric_by_class_may_be_reported_for_each_class():
    """ "recall" is by class; there are two classes, and two ways to predict."""
    assert task_of("ab").figure_names(["auc", "recall"]) == {
        "head/auc",
        "head/recall/0",
        "head/recall/1",
        "prototype/auc",
        "prototype/recall/0",
        "prototype/recall/1",
    }


def test_a_metric_that_nobody_knows_is_refused_with_the_choices():
    said = "metrics = 'auc, f1': 'f1' is not one of balanced-accuracy, macro-f1, auc"
    with pytest.raises(SettingsError, match=said):
        metric_names("auc, f1", [*METRICS, "recall"])


def test_a_client_of_one_class_or_none_has_no_figure_that_is_no_number(monkeypatch):
    """An AUC needs samples of two classes; a metric of one's own may be NaN."""
    module = ModuleType("mine")
    exec("def certain(scores, labels): return float('nan')", vars(module))
    monkeypatch.setitem(sys.modules, "mine", module)
    allow(["mine"])
    assert evaluate_metrics(["mine:certain", "auc"], METRICS, SCORES[:2], LABELS[:2]) == {}
    assert evaluate_metrics(["auc", "recall"], METRICS, SCORES[:0], LABELS[:0]) == {}


def test_a_metric_of_ones_own_may_change_its_arrays(monkeypatch):
    """The metrics behind it are those without it, and the client keeps its labels."""
    module = ModuleType("mine")
    exec("def ruins(scores, labels):\n  scores[:] = labels[:] = 0\n  return 1", vars(module))
    monkeypatch.setitem(sys.modules, "mine", module)
    allow(["mine"])
    scores = SCORES.copy()
    labels = LABELS.copy()

    figures = evaluate_metrics(["mine:ruins", "auc"], METRICS, scores, labels)

    assert figures == {"mine:ruins": 1.0, "auc": pytest.approx(AUC)}
    assert labels.tolist() == LABELS.tolist()


@pytest.mark.slow
def test_the_error_of_an_auc_is_that_of_resampling():
    """DeLong's variance against 2,000 bootstrap samples of those with and without the label."""
    task = task_of(["a", "b"], "multi-label")
    rng = np.random.default_rng(4)
    # 60 samples have the first label and 140 lack it; of the second nothing is known (-1)
    truth = np.repeat([[1, -1], [0, -1]], [60, 140], axis=0)
    scores = np.round(rng.normal(size=(200, 2)) + 0.8 * (truth == 1), 1)  # with ties
    figures = task.figures(["label-auc", "label-auc-error"], scores, truth)
    assert figures.keys() == {"label-auc/1", "label-auc-error/1"}

    drawn = []
    for _ in range(2000):
        rows = np.concatenate([rng.integers(60, size=60), rng.integers(60, 200, size=140)])
        drawn.append(task.figures(["auc"], scores[rows], truth[rows])["auc"])
    assert figures["label-auc-error/1"] == pytest.approx(np.std(drawn), rel=0.05)

    # where figures are rounded to what two samples add, they have no error
    assert task.figures(["label-auc-error"], scores, truth, least=2) == {}
    # nor has the figure of a label that one sample has
    assert task.figures(["label-auc-error"], scores[59:], truth[59:]) == {}


def test_a_threshold_has_the_best_f1_of_all():
    """The F1 at the chosen threshold is compared with that at every threshold between two scores.

    Scores are shifted by their thresholds, so that 0 divides them.
    """
    task = task_of(["a", "b"], "multi-label")
    rng = np.random.default_rng(6)
    truth = np.stack([rng.random(80) < 0.2, np.ones(80)], 1).astype(np.int64)
    scores = np.round(rng.normal(-3, 1, (80, 2)) + truth, 1)
    thresholds = task.thresholds(scores, truth)
    assert thresholds[1] == 0  # all have it
    found = task.figures(["macro-f1"], scores - thresholds, truth)["macro-f1"]
    tried = []
    for threshold in np.unique(scores[:, 0]) - 0.05:  # between scores, which are 0.1 apart
        predicted = scores[:, 0] > threshold
        right = (predicted & (truth[:, 0] == 1)).sum()
        tried.append(2 * right / (predicted.sum() + truth[:, 0].sum()))
    assert found == pytest.approx(max(tried))
    assert found > task.figures(["macro-f1"], scores, truth)["macro-f1"]


def test_a_threshold_beside_an_infinite_score_keeps_the_others_apart():
    """±1e30 stands for infinity: a midpoint to it would lie beyond all other scores."""
    task = task_of(["a"], "multi-label")
    positive = np.linspace(0, 5, 9)[:, None]
    truth = np.repeat([[1], [0]], [9, 1], axis=0)

    below_all = task.thresholds(np.append(positive, [[-1e30]], axis=0), truth)
    above_all = task.thresholds(np.append(-positive, [[1e30]], axis=0), 1 - truth)

    assert below_all == pytest.approx(-0.5)
    assert above_all == pytest.approx(0.5)


def test_only_validation_samples_choose_thresholds():
    """Test samples are given those of validation samples, which are none without such samples."""
    task = task_of(["a"], "multi-label")
    samples = Samples(torch.tensor([[-3.0], [-2.0], [1.0]]), torch.tensor([[0], [1], [1]]))
    model = SplitModel(nn.Identity(), nn.Identity())

    def chosen(thresholds):
        return evaluate(model, samples, 3, task, metrics=["auc"], thresholds=thresholds).thresholds

    assert chosen(None) == {"head": np.array([-2.5])}
    assert chosen({}) == {}


def test_rounded_figures_do_not_depend_on_validation_samples():
    """One validation sample may move a threshold past many test samples.

    Metrics of at least ``least`` = 10 samples are rounded, and take no threshold.
    """
    task = task_of(["a"], "multi-label")
    scores = torch.cat([torch.linspace(-5, 5, 40), torch.full((40,), -9.0)])[:, None]
    labels = torch.tensor([1] * 40 + [0] * 40)[:, None]
    model = SplitModel(nn.Identity(), nn.Identity())
    samples = Samples(scores, labels)

    def macro_f1(least, threshold):
        """Return it with this threshold, over the classes with at least ``least`` samples."""
        thresholds = {"head": np.array([threshold])}
        found = evaluate(
            model, samples, 80, task, metrics=["macro-f1"], least=least, thresholds=thresholds
        )
        return found.metrics["head/macro-f1"]

    assert macro_f1(1, 0.0) < macro_f1(1, -7.0) == 1
    assert macro_f1(10, 0.0) == macro_f1(10, -7.0)
