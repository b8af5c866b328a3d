"""Small classes are left out, small clusters merged; the papers' noise has the papers' size."""

import numpy as np
import pytest
import torch

from protofl_common.config.architectures import GAUSSIAN_HEADS
from protofl_common.data.raw import DataError
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy import release
from tests.support.given import Patch

OF_CLASSES, COUNTS = torch.tensor([[0, 0, 0, 1, 2, 2], [5, 1, 3, 2, 7, 1]])
CLUSTERS = Prototypes(torch.tensor([[1.0], [4.0], [6.0], [9.0], [2.0], [8.0]]), OF_CLASSES, COUNTS)


def test_small_clusters_of_a_class_become_one_and_a_small_class_goes() -> None:
    found = release.large_enough(CLUSTERS, 4)
    assert found.labels.tolist() == [0, 0, 2]
    assert found.counts.tolist() == [
        5,
        4,
        7,
    ]  # 1 + 3 merged; of class 2 the cluster of one is left out
    assert found.means.flatten().tolist() == [1.0, (4 + 3 * 6) / 4, 2.0]
    assert release.large_enough(CLUSTERS, 1) is CLUSTERS


def test_metrics_are_of_classes_beside_which_none_or_many_samples_are() -> None:
    for sizes, told in (([30, 25, 12], [0]), ([30, 12, 9], [0]), ([25, 30], [0, 1]), ([12, 9], [])):
        assert release.tested_classes(np.repeat([*range(len(sizes))], sizes), 5).tolist() == told


@pytest.mark.parametrize(
    ("noise", "deviation"), [("gaussian 0.05 0.1", 0.05), ("laplace 0.05 0.1", 0.05 * 2**0.5)]
)
def test_noise_shrinks_by_p_and_has_scale_s(noise: str, deviation: float) -> None:
    found = release.noised(torch.ones(200, 100), noise, seed=1)
    assert found.dtype == torch.float32
    assert float(found.mean()) == pytest.approx(0.9, abs=0.003)
    assert float(found.std()) == pytest.approx(deviation, rel=0.03)
    assert torch.equal(found, release.noised(torch.ones(200, 100), noise, seed=1))


def test_noised_images_are_bytes_about_middle_grey() -> None:
    images = np.full((50, 1, 20, 20), 191, dtype=np.uint8)
    found = release.noised_images(images, "gaussian 0.2 0.5", seed=1)
    assert (found.dtype, found.shape) == (images.dtype, images.shape)
    assert float(found.mean()) == pytest.approx(127.5 + 0.5 * 63.5, abs=1)
    assert float(found.std()) == pytest.approx(0.2 * 127.5, rel=0.05)
    with pytest.raises(DataError, match=r"image-noise = 'gaussian 0.2 0.5': only images"):
        release.noised_images(np.zeros((3, 4), np.float32), "gaussian 0.2 0.5", seed=1)


FEATURES = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0], [1.0, 0.0]], dtype=torch.float32)
LABELS = torch.tensor([0, 0, 1, 2])


def test_class_means_of_cut_features_by_hand() -> None:
    """Lengths 5, 0.5, 2 and 1, cut to 1; the noise is too small to be seen."""
    found = release.private_class_means(
        FEATURES, LABELS, 4, clip=1.0, noise=1e-6, draw=np.random.default_rng(0)
    )
    torch.testing.assert_close(
        found.means, torch.tensor([[0.45, 0.6], [0.0, 1.0], [1.0, 0.0]]), atol=1e-4, rtol=0
    )
    assert found.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("clip", [1.0, 3.0])
def test_the_noise_of_a_table_has_the_size_that_the_accountant_assumes(
    clip: float, monkeypatch: Patch
) -> None:
    """A sample changes the sums over clip, beside the counts, by √2 at most: so much times the multiplier."""
    draw, sigma, n, dim = np.random.default_rng(0), 3.0, 4000, 50
    features, labels = torch.zeros(n, dim), torch.zeros(n, dtype=torch.int64)
    found = [release.private_class_means(features, labels, 1, clip, sigma, draw) for _ in range(40)]
    assert float(torch.cat([one.means for one in found]).std()) == pytest.approx(
        clip * 2**0.5 * sigma / n, rel=0.05
    )
    monkeypatch.setattr(release, "bounded_counts", lambda noisy, samples: noisy)
    assert float(
        release.private_counts(torch.full((4000,), n), sigma, draw).std()
    ) == pytest.approx(sigma, rel=0.05)


def test_a_class_that_nobody_has_is_rarely_told_and_one_is_always() -> None:
    draw, labels = np.random.default_rng(0), torch.zeros(100, dtype=torch.int64)
    tables = [
        release.private_class_means(torch.ones(100, 2), labels, 10, 1.0, 4.0, draw)
        for _ in range(50)
    ]
    told = [one.labels.tolist() for one in tables]
    assert all(0 in one for one in told)
    assert sum(len(one) - 1 for one in told) < 0.05 * 9 * 50
    assert len(release.private_class_means(torch.ones(3, 2), labels[:3], 10, 1.0, 500.0, draw)) >= 1
    for seed in range(30):
        counts = release.private_counts(
            torch.tensor([3, 0, 1, 0]), 5.0, np.random.default_rng(seed)
        )
        assert 1 <= int(counts.sum()) <= 4
        assert int(counts.min()) >= 0


@pytest.mark.parametrize("clip", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e38, 3.4e38])
def test_one_odd_sample_changes_the_table_by_the_length_that_the_noise_is_for(
    odd: float, clip: float
) -> None:
    """Features that are not finite count as zeros; huge ones are cut. The others' sums stay as they are."""
    tables = []
    for features in (torch.zeros(2), torch.tensor([odd, 1.0]), torch.tensor([odd, odd])):
        rows = torch.cat([torch.full((50, 2), clip / 9), features[None]])
        labels, draw = torch.zeros(51, dtype=torch.int64), np.random.default_rng(0)
        found = release.private_class_means(rows, labels, 1, clip, 1e-9, draw)
        assert found.counts.tolist() == [51]
        tables.append(51 * found.means[0] / clip)
    assert all(float((one - tables[0]).norm()) <= 1 + 1e-4 for one in tables)


def test_numbers_of_right_predictions_have_noise_for_one_sample_in_each_and_stay_possible() -> None:
    draw, sigma = np.random.default_rng(0), 5.0
    for correct in ({"head": 500}, {"head": 500, "prototype": 700}):
        found = [release.private_hits(correct, 1000, sigma, draw) for _ in range(3000)]
        for kind, hits in correct.items():
            values = [one[kind] for one in found]
            assert np.std(values) == pytest.approx(len(correct) ** 0.5 * sigma, rel=0.05)
            assert np.mean(values) == pytest.approx(hits, abs=0.5)
    assert {release.private_hits({"head": 0}, 3, 9.0, draw)["head"] for _ in range(200)} == {
        0,
        1,
        2,
        3,
    }
    assert release.private_hits({}, 3, 9.0, draw) == {}
    assert (
        release.fresh_draw().random() != release.fresh_draw().random()
    )  # noise is not that of a seed


F = 5
PARTS = {"shares": 1 / 6, "first": 4 / 6, "second": 1 / 6}
Rows = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def released(
    x_NF: torch.Tensor, labels_N: torch.Tensor, head: str, clip: float, noise: float
) -> dict[str, Rows]:
    """What a client releases, as sums in units of ``clip``; second moments as whole matrices where they are such."""
    moments = ClassMoments(3, F, head)
    release.private_moments(moments, x_NF, labels_N, clip, noise, release.fresh_draw())
    units = {"shares": 1.0, "first": clip, "second": clip**2}
    sums = {
        name: value.numpy() * len(labels_N) / units[name] for name, value in moments.named_buffers()
    }
    if head != "naive-bayes":
        whole = np.zeros((*sums["second"].shape[:-1], F, F))
        rows, columns = np.triu_indices(F)
        whole[..., rows, columns] = whole[..., columns, rows] = sums["second"]
        sums["second"] = whole
    return sums


ODD = [
    [1e30] * F,
    [np.nan] * F,
    [np.inf, 0, 0, 0, 0],
    [1e-30] * F,
    [9.0, 0, 0, 0, 0],
    [-2.0, 2, -2, 2, 2],
    [0.0] * F,
]


@pytest.mark.parametrize("head", GAUSSIAN_HEADS)
@pytest.mark.parametrize("clip", [0.3, 4.0])
def test_no_sample_changes_class_moments_by_more_than_the_noise_is_for(
    head: str, clip: float
) -> None:
    """The search over neighbours comes up to the bound, so the noise is not too large either."""
    torch.manual_seed(1)
    lengths = []
    for trial in range(100):
        x_NF, labels_N = torch.randn(8, F) * 4 ** float(torch.randn(())), torch.randint(3, (8,))
        if trial < len(ODD):
            x_NF[-1] = torch.tensor(ODD[trial])
        with_it, without = (released(x_NF[:n], labels_N[:n], head, clip, 0.0) for n in (8, 7))
        squares = [
            part * ((with_it[name] - without[name]) ** 2).sum() for name, part in PARTS.items()
        ]
        lengths.append(np.sqrt(sum(squares)))
    assert max(lengths) <= 1 + 1e-9
    assert max(lengths) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("head", GAUSSIAN_HEADS)
def test_the_noise_of_class_moments_has_the_size_that_the_accountant_assumes(head: str) -> None:
    """Beside the diagonal a number stands for two of the matrix, so these have a deviation √½ as large."""
    nothing, labels_N, noise = torch.zeros(7, F), torch.zeros(7, dtype=torch.long), 2.0
    draws = [released(nothing, labels_N, head, 3.0, noise) for _ in range(3000)]
    each = {name: np.stack([one[name] for one in draws]) for name in PARTS}
    each["shares"][:, 0] -= 7
    diagonal = np.eye(F, dtype=bool) if head != "naive-bayes" else np.ones((3, F), dtype=bool)
    numbers = [each["shares"], each["first"], each["second"][..., diagonal]]
    if head == "naive-bayes":
        numbers[2] = each["second"]
    for values, part in zip(numbers, PARTS.values(), strict=True):
        np.testing.assert_allclose(values.reshape(3000, -1).std(0), noise / part**0.5, rtol=0.07)
        assert abs(values.mean()) < 0.2
    if head != "naive-bayes":
        beside = each["second"][..., ~diagonal].reshape(3000, -1).std(0)
        np.testing.assert_allclose(beside, noise / (PARTS["second"] * 2) ** 0.5, rtol=0.07)
