"""Losses by hand and against loops: edges and options that the algorithms' scripts do not reach."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from protofl_common.maths import losses as terms

FEATURES = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0], [5.0, 5.0]])
LABELS = torch.tensor([0, 0, 2, 3])
PROTOTYPES = torch.tensor([[1.5, 0.0], [9.0, 9.0], [1.0, 4.0], [0.0, 0.0]])
HELD = torch.tensor([True, True, True, False])
"""Which classes have a prototype. The means of the features are (1.5, 2) in class 0 and (1, 1) in
class 2, so 2 and 3 from their prototypes; class 3 has no prototype, class 1 no samples."""


@pytest.mark.parametrize(("granularity", "distance", "expected"), [
    ("class", "l2", 2.0 + 3.0),
    ("class", "squared-l2", 4.0 + 9.0),
    ("class", "l1", 2.0 + 3.0),
    ("class", "mse", 2.0 + 4.5),
    # FedTGP's E_c: over the batch's classes with a prototype, 0 and 2
    ("class-mean", "l2", (2.0 + 3.0) / 2),
    # the sample of class 3 counts in B = 4 only
    ("sample", "squared-l2", ((1.5**2 + 4**2) + 1.5**2 + 3**2) / 4),
])  # fmt: skip
def test_alignment_by_hand(granularity, distance, expected):
    loss = terms.prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, distance, granularity)
    assert loss.item() == pytest.approx(expected)


def test_gradient_is_finite_on_the_prototype_itself():
    """The slope of a distance (l2) is not defined at 0."""
    labels = torch.tensor([0, 2])
    features = PROTOTYPES[labels].clone().requires_grad_()
    loss = terms.prototype_alignment(features, labels, PROTOTYPES, HELD, "l2", "class")
    loss.backward()

    assert features.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("granularity", ["class", "class-mean", "sample"])
def test_no_prototypes_no_loss(granularity):
    none = torch.zeros(4, dtype=torch.bool)
    loss = terms.prototype_alignment(FEATURES, LABELS, PROTOTYPES, none, "l2", granularity)
    assert loss.item() == 0.0


@pytest.mark.parametrize(
    ("distance", "granularity", "said"), [("cosine", "class", "cosine"), ("l2", "epoch", "epoch")]
)
def test_unknown_options_are_refused(distance, granularity, said):
    with pytest.raises(ValueError, match=said):
        terms.prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, distance, granularity)


SAMPLES = torch.tensor([[3.0, 4.0], [-2.0, 0.0]], dtype=torch.float64)
CLASSES = torch.tensor([0, 1])
TARGETS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [6.0, 8.0]], dtype=torch.float64)


def test_angular_alignment_leaves_out_classes_without_a_prototype():
    """The loss is 1 − cos: cosines are 0.6 and 0. A sample left out still counts in B."""
    held = torch.tensor([True, True, False])
    both = terms.angular_alignment(SAMPLES, CLASSES, TARGETS, held)

    assert both.item() == pytest.approx(((1 - 0.6) + (1 - 0)) / 2)

    first_alone = terms.angular_alignment(SAMPLES, torch.tensor([0, 2]), TARGETS, held)
    assert first_alone.item() == pytest.approx((1 - 0.6) / 2)


def test_a_class_alone_has_no_others_to_keep_away_from():
    gamma = 10.0  # the weight of the others
    loss = terms.orthogonality(SAMPLES[:1], CLASSES[:1], TARGETS[:1], gamma)
    assert loss.item() == pytest.approx(1 - 0.6)  # 1 − cos
    assert terms.nearest_distances(SAMPLES[:1]).tolist() == [0.0]


def test_distillation_by_hand_leaves_out_a_class_without_a_teacher():
    """The probabilities F are (1/2, 1/4, 1/4) for a sample of class 0, and 1/3 each for 1 and 2.

    Class 1 has no teacher, and its sample counts in B only. Expected is −Σ_c F̂_{y,c} log F_c.
    """
    targets = torch.tensor([[0.5, 0.25, 0.25], [9.0, 9.0, 9.0], [0.0, 0.0, 1.0]]).double()
    logits = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]).double().log()
    has_teacher = torch.tensor([True, False, True])

    loss = terms.class_distillation(logits, torch.arange(3), targets, has_teacher)

    first = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(4)
    third = math.log(3)

    assert loss.item() == pytest.approx((first + third) / 3, rel=1e-12)


def test_two_models_without_a_mistake_have_no_infinite_term():
    """FedKD divides by the sum of the two task losses, which is 0 here."""
    none = torch.tensor(0.0)
    assert terms.adaptive_distillation(none, none, none).item() == 0.0


TAU = 0.3
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def arrays():
    """Features z [B, D], their labels y [B], sets of prototypes [m, C, D], and which are held.

    The first of three sets lacks class 4, the second class 2.
    """
    torch.manual_seed(1)
    z = normalize(torch.randn(6, 4, dtype=torch.float64), dim=1)
    y = torch.tensor([0, 1, 2, 3, 4, 0])
    sets = normalize(torch.randn(3, 5, 4, dtype=torch.float64), dim=2)
    held = torch.ones(3, 5, dtype=torch.bool)
    held[0, 4] = False
    held[1, 2] = False
    return z, y, sets, held


@pytest.mark.parametrize("with_own", [False, True])
def test_prototype_contrast_against_equations_8_and_9_of_fedpcl(with_own, arrays):
    """The denominator sums over the other classes' prototypes, or over the own one as well."""
    z, y, sets, held = (array.numpy() for array in arrays)
    losses = []
    for sample, label in zip(z, y, strict=True):
        of_sets = []
        for table, has in zip(sets, held, strict=True):
            if not has[label]:
                continue
            below = 0.0
            for c in range(5):
                if has[c] and (with_own or c != label):
                    below += math.exp(sample @ table[c] / TAU)
            of_sets.append(-math.log(math.exp(sample @ table[label] / TAU) / below))
        losses.append(np.mean(of_sets))

    loss = terms.prototype_contrast(*arrays, TAU, with_own)

    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-10)


def test_without_anything_to_contrast_with_nothing_is_learnt():
    """All these contrasts are 0, and their gradients too.

    No sample has a partner of its class, no prototype is known, or only one of another class.
    """
    z = torch.randn(4, 3, requires_grad=True)
    labels = torch.tensor([0, 1, 0, 1])
    none = torch.zeros(4, 2, dtype=torch.bool)
    similarity = terms.sparse_similarity(z, torch.rand(2, 3), 0.25, 1e-6)

    losses = [
        terms.supervised_contrast(z, torch.arange(4), TAU),
        terms.sparse_contrast(similarity, none, TAU),
    ]
    sets = torch.zeros(1, 2, 3)
    no_prototype = torch.tensor([[False, False]])
    one_class_alone = torch.tensor([[True, False]])
    for held in (no_prototype, one_class_alone):
        losses.append(terms.prototype_contrast(z, labels, sets, held, TAU, with_own=False))
        losses.append(terms.prototype_contrast(z, labels, sets, held, TAU, with_own=True))

    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, z, retain_graph=True)
        assert loss.item() == 0
        assert gradient.abs().sum() == 0


def test_supcon_against_its_equation(arrays):
    """A sample's partners are the others of its class; the denominator sums over all others."""
    z = arrays[0].numpy()
    y = np.array([0, 1, 0, 1, 1, 2])
    losses = []
    for i in range(6):
        partners = [p for p in range(6) if p != i and y[p] == y[i]]
        if partners:
            below = sum(math.exp(z[i] @ z[a] / TAU) for a in range(6) if a != i)
            logs = [math.log(math.exp(z[i] @ z[p] / TAU) / below) for p in partners]
            losses.append(-np.mean(logs))

    assert len(losses) == 5  # the sample of class 2 has no partner, and does not count

    loss = terms.supervised_contrast(arrays[0], torch.from_numpy(y), TAU)

    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-10)


ALPHA = 0.25
FLOOR = 1e-6


def cosine(one, other):
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_corrections_that_do_not_grow_with_the_number_of_prototypes():
    """Two of FedPLVM's corrections do not: the mean over the prototypes, and the one by centres.

    The paper's sum (Eq. 8) doubles when every prototype is there twice.
    """
    torch.manual_seed(0)
    z = torch.rand(7, 5, dtype=torch.float64) + 0.05
    y = torch.tensor([0, 0, 1, 2, 2, 3, 1])
    g = torch.rand(6, 5, dtype=torch.float64) + 0.05
    labels = torch.tensor([0, 0, 1, 2, 2, 2])  # of the prototypes g: none is of class 3

    means = []
    centres = []
    for sample, label in zip(z.numpy(), y, strict=True):
        of_class = g[labels == label].numpy()
        if len(of_class) == 0:
            means.append(0.0)
            centres.append(0.0)
            continue
        means.append(1 - np.mean([cosine(sample, p) ** ALPHA for p in of_class]))
        centres.append(2 * (cosine(sample, of_class.sum(axis=0)) - 1) ** 2)
    mean = pytest.approx(np.mean(means), rel=1e-10)
    centre = pytest.approx(np.mean(centres), rel=1e-10)

    own = y.unsqueeze(1) == labels  # [B, G]: which prototypes are of a sample's class
    similarity = terms.sparse_similarity(z, g, ALPHA, FLOOR)

    assert terms.sparse_correction(similarity, own, mean=True).item() == mean
    assert terms.centre_correction(z, g, own).item() == centre

    # with every prototype twice
    own_twice = torch.cat([own, own], dim=1)
    similarity_twice = torch.cat([similarity, similarity], dim=1)

    assert terms.sparse_correction(similarity_twice, own_twice, mean=True).item() == mean
    assert terms.centre_correction(z, torch.cat([g, g]), own_twice).item() == centre

    single = terms.sparse_correction(similarity, own).item()
    double = terms.sparse_correction(similarity_twice, own_twice).item()

    assert double == pytest.approx(2 * single)


def test_orthogonal_and_zero_features_have_finite_gradients():
    """The slope of cos^α is infinite at a cosine of 0, as α is below 1."""
    z = torch.tensor([[1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    similarity = terms.sparse_similarity(z, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), ALPHA, FLOOR)
    own = torch.tensor([[True, False], [True, False]])
    contrast = terms.sparse_contrast(similarity, own, 0.07)
    correction = terms.sparse_correction(similarity, own)
    (contrast + correction).backward()

    assert torch.isfinite(z.grad).all()
