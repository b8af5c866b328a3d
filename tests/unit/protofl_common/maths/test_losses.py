"""Losses by hand and against loops: the edges and options that the scripts of the algorithms do not reach."""

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
# class means: 0 -> (1.5, 2), 2 -> (1, 1); class 3 has no prototype, class 1 no samples


@pytest.mark.parametrize(("granularity", "distance", "expected"), [
    ("class", "l2", 2.0 + 3.0),
    ("class", "squared-l2", 4.0 + 9.0),
    ("class", "l1", 2.0 + 3.0),
    ("class", "mse", 2.0 + 4.5),
    ("class-mean", "l2", (2.0 + 3.0) / 2),  # FedTGP's E_c: over the batch's classes with a prototype, 0 and 2
    ("sample", "squared-l2", ((1.5**2 + 4**2) + 1.5**2 + 3**2) / 4),  # that of class 3 counts in B = 4 only
])  # fmt: skip
def test_alignment_by_hand(granularity: str, distance: str, expected: float) -> None:
    found = terms.prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, distance, granularity)
    assert found.item() == pytest.approx(expected)


def test_gradient_is_finite_on_the_prototype_itself() -> None:
    features = PROTOTYPES[[0, 2]].clone().requires_grad_()
    terms.prototype_alignment(
        features, torch.tensor([0, 2]), PROTOTYPES, HELD, "l2", "class"
    ).backward()
    assert features.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_no_prototypes_no_loss() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    for granularity in ("class", "class-mean", "sample"):
        assert (
            terms.prototype_alignment(FEATURES, LABELS, PROTOTYPES, none, "l2", granularity).item()
            == 0.0
        )


@pytest.mark.parametrize(
    ("distance", "granularity", "said"), [("cosine", "class", "cosine"), ("l2", "epoch", "epoch")]
)
def test_unknown_options_are_refused(distance: str, granularity: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        terms.prototype_alignment(FEATURES, LABELS, PROTOTYPES, HELD, distance, granularity)


SAMPLES = torch.tensor([[3.0, 4.0], [-2.0, 0.0]], dtype=torch.float64)
CLASSES = torch.tensor([0, 1])
TARGETS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [6.0, 8.0]], dtype=torch.float64)


def test_angular_alignment_leaves_out_classes_without_a_prototype() -> None:
    held = torch.tensor([True, True, False])
    assert terms.angular_alignment(
        SAMPLES, torch.tensor([0, 2]), TARGETS, held
    ).item() == pytest.approx((1 - 0.6) / 2)
    assert terms.angular_alignment(SAMPLES, CLASSES, TARGETS, held).item() == pytest.approx(
        (0.4 + 1.0) / 2
    )


def test_a_class_alone_has_no_others_to_keep_away_from() -> None:
    assert terms.orthogonality(SAMPLES[:1], CLASSES[:1], TARGETS[:1], 10.0).item() == pytest.approx(
        1 - 0.6
    )
    assert terms.nearest_distances(SAMPLES[:1]).tolist() == [0.0]


def test_distillation_by_hand_leaves_out_a_class_without_a_teacher() -> None:
    """F = (1/2, 1/4, 1/4), (1/3, 1/3, 1/3) and again; class 1 has no teacher, and counts in B only."""
    targets = torch.tensor(
        [[0.5, 0.25, 0.25], [9.0, 9.0, 9.0], [0.0, 0.0, 1.0]], dtype=torch.float64
    )
    logits = torch.tensor(
        [[math.log(2), 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64
    )
    found = terms.class_distillation(
        logits, torch.tensor([0, 1, 2]), targets, torch.tensor([True, False, True])
    )
    own = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(4)
    assert found.item() == pytest.approx((own + math.log(3)) / 3, rel=1e-12)


def test_two_models_without_a_mistake_have_no_infinite_term() -> None:
    none = torch.tensor(0.0)
    assert terms.adaptive(none, none, none).item() == 0.0


TAU = 0.3
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def arrays() -> Arrays:
    torch.manual_seed(1)
    z = normalize(torch.randn(6, 4, dtype=torch.float64), dim=1)
    sets, held = (
        normalize(torch.randn(3, 5, 4, dtype=torch.float64), dim=2),
        torch.ones(3, 5, dtype=torch.bool),
    )
    held[0, 4], held[1, 2] = False, False
    return z, torch.tensor([0, 1, 2, 3, 4, 0]), sets, held


@pytest.mark.parametrize("with_own", [False, True])
def test_against_equations_8_and_9(with_own: bool, arrays: Arrays) -> None:
    z, y, sets, held = (array.numpy() for array in arrays)
    losses = []
    for sample, label in zip(z, y, strict=True):
        of_sets = []
        for table, has in zip(sets, held, strict=True):
            if has[label]:
                against = [c for c in range(5) if has[c] and (with_own or c != label)]
                below = sum(math.exp(sample @ table[c] / TAU) for c in against)
                of_sets.append(-math.log(math.exp(sample @ table[label] / TAU) / below))
        losses.append(np.mean(of_sets))
    assert terms.prototype_contrast(*arrays, TAU, with_own).item() == pytest.approx(
        np.mean(losses), rel=1e-10
    )


def test_without_anything_to_contrast_with_nothing_is_learnt() -> None:
    z, labels, none = (
        torch.randn(4, 3, requires_grad=True),
        torch.tensor([0, 1, 0, 1]),
        torch.zeros(4, 2) > 0,
    )
    similarity = terms.sparse_similarity(z, torch.rand(2, 3), 0.25, 1e-6)
    losses = [
        terms.supervised_contrast(z, torch.arange(4), TAU),
        terms.sparse_contrast(similarity, none, TAU),
    ]
    for held in ([False, False], [True, False]):
        sets = (torch.zeros(1, 2, 3), torch.tensor([held]))
        losses += [
            terms.prototype_contrast(z, labels, *sets, TAU, with_own) for with_own in (False, True)
        ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, z, retain_graph=True)
        assert loss.item() == 0
        assert gradient.abs().sum() == 0


def test_supcon_against_its_equation(arrays: Arrays) -> None:
    z, y = arrays[0].numpy(), np.array([0, 1, 0, 1, 1, 2])
    losses = []
    for i in range(6):
        partners = [p for p in range(6) if p != i and y[p] == y[i]]
        if partners:
            below = sum(math.exp(z[i] @ z[a] / TAU) for a in range(6) if a != i)
            losses.append(
                -np.mean([math.log(math.exp(z[i] @ z[p] / TAU) / below) for p in partners])
            )
    assert len(losses) == 5
    found = terms.supervised_contrast(arrays[0], torch.from_numpy(y), TAU)
    assert found.item() == pytest.approx(np.mean(losses), rel=1e-10)


ALPHA, FLOOR = 0.25, 1e-6


@pytest.fixture
def clusters() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    z, g = (
        torch.rand(7, 5, dtype=torch.float64) + 0.05,
        torch.rand(6, 5, dtype=torch.float64) + 0.05,
    )
    return (
        z,
        torch.tensor([0, 0, 1, 2, 2, 3, 1]),
        g,
        torch.tensor([0, 0, 1, 2, 2, 2]),
    )  # nobody has class 3


def test_corrections_that_do_not_grow_with_the_prototypes(
    clusters: tuple[torch.Tensor, ...],
) -> None:
    z, y, g, labels = clusters
    similarity, own = terms.sparse_similarity(z, g, ALPHA, FLOOR), y.unsqueeze(1) == labels
    means, centres = [], []
    for sample, label in zip(z.numpy(), y.numpy(), strict=True):
        of_class = [p for p, one in zip(g.numpy(), labels, strict=True) if one == label]
        if not of_class:
            means.append(0.0)
            centres.append(0.0)
            continue
        cosines = [
            sample @ p / np.linalg.norm(sample) / np.linalg.norm(p)
            for p in (*of_class, sum(of_class))
        ]
        means.append(1 - float(np.mean([cosine**ALPHA for cosine in cosines[:-1]])))
        centres.append(2 * (cosines[-1] - 1) ** 2)
    assert terms.sparse_correction(similarity, own, mean=True).item() == pytest.approx(
        np.mean(means), rel=1e-10
    )
    assert terms.centre_correction(z, g, own).item() == pytest.approx(np.mean(centres), rel=1e-10)
    twice, both = torch.cat([g, g]), torch.cat([own, own], dim=1)
    similar = torch.cat([similarity, similarity], dim=1)
    assert terms.sparse_correction(similar, both, mean=True).item() == pytest.approx(
        np.mean(means), rel=1e-10
    )
    assert terms.centre_correction(z, twice, both).item() == pytest.approx(
        np.mean(centres), rel=1e-10
    )
    single = terms.sparse_correction(similarity, own).item()
    assert terms.sparse_correction(similar, both).item() == pytest.approx(2 * single)


def test_orthogonal_and_zero_features_have_finite_gradients() -> None:
    z = torch.tensor([[1.0, 0.0], [0.0, 0.0]], requires_grad=True)
    similarity = terms.sparse_similarity(z, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), ALPHA, FLOOR)
    own = torch.tensor([[True, False], [True, False]])
    (
        terms.sparse_contrast(similarity, own, 0.07) + terms.sparse_correction(similarity, own)
    ).backward()
    assert torch.isfinite(z.grad).all()
