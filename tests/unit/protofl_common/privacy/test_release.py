"""Small classes are left out, small clusters merged; the papers' noise has the papers' size."""

import numpy as np
import pytest
import torch

from protofl_common.data.raw import DataError
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy import release
from protofl_common.tasks import metrics

CLUSTERS = Prototypes(
    means=torch.tensor([[1.0], [4.0], [6.0], [9.0], [2.0], [8.0]]),
    labels=torch.tensor([0, 0, 0, 1, 2, 2]),
    counts=torch.tensor([5, 1, 3, 2, 7, 1]),
)


def test_small_clusters_of_a_class_become_one_and_a_small_class_goes():
    """Of at least 4 samples: class 0's clusters of 1 and 3 are merged.

    Class 1 (2 samples), and class 2's cluster of 1, are left out.
    """
    large = release.large_enough(CLUSTERS, 4)

    assert large.labels.tolist() == [0, 0, 2]
    assert large.counts.tolist() == [5, 1 + 3, 7]
    assert large.means.flatten().tolist() == [1.0, (4 + 3 * 6) / 4, 2.0]
    assert release.large_enough(CLUSTERS, 1) is CLUSTERS


@pytest.mark.parametrize(
    ("sizes", "told"),
    [([30, 25, 12], [0]), ([30, 12, 9], [0]), ([25, 30], [0, 1]), ([12, 9], [])],
)
def test_metrics_are_of_classes_beside_which_none_or_many_samples_are(sizes, told):
    """A class needs 20 test samples (FEWEST_TESTED), and the others together as many, or none.

    Otherwise the smallest large class is not told either. ``sizes``: of classes 0, 1, …
    """
    labels = np.repeat(np.arange(len(sizes)), sizes)
    assert metrics.tested_classes(labels, 5).tolist() == told


@pytest.mark.parametrize(
    ("noise", "deviation"), [("gaussian 0.05 0.1", 0.05), ("laplace 0.05 0.1", 0.05 * 2**0.5)]
)
def test_noise_shrinks_by_p_and_has_scale_s(noise, deviation):
    """``noise`` is "KIND S P"; Laplace noise of scale S has a deviation of √2 S."""
    noised = release.noised(torch.ones(200, 100), noise, seed=1)

    assert noised.dtype == torch.float32
    assert float(noised.mean()) == pytest.approx(0.9, abs=0.003)
    assert float(noised.std()) == pytest.approx(deviation, rel=0.03)
    assert torch.equal(noised, release.noised(torch.ones(200, 100), noise, seed=1))


def test_noised_images_are_bytes_about_middle_grey():
    """ "gaussian S P" with S = 0.2 and P = 0.5, on a scale where grey is 0 and white 1."""
    images = np.full((50, 1, 20, 20), 191, dtype=np.uint8)
    noised = release.noised_images(images, "gaussian 0.2 0.5", seed=1)

    assert noised.dtype == images.dtype
    assert noised.shape == images.shape
    above_grey = 191 - 127.5  # which P = 0.5 halves
    assert float(noised.mean()) == pytest.approx(127.5 + 0.5 * above_grey, abs=1)
    assert float(noised.std()) == pytest.approx(0.2 * 127.5, rel=0.05)

    with pytest.raises(DataError, match=r"image-noise = 'gaussian 0.2 0.5': only images"):
        release.noised_images(np.zeros((3, 4), np.float32), "gaussian 0.2 0.5", seed=1)


FEATURES = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 2.0], [1.0, 0.0]], dtype=torch.float32)
LABELS = torch.tensor([0, 0, 1, 2])


def test_class_means_of_cut_features_by_hand():
    """Lengths 5, 0.5, 2 and 1, cut to 1; the noise is too small to be seen."""
    draw = np.random.default_rng(0)
    table = release.private_class_means(FEATURES, LABELS, 4, clip=1.0, noise=1e-6, draw=draw)
    means = torch.tensor([[0.45, 0.6], [0.0, 1.0], [1.0, 0.0]])

    torch.testing.assert_close(table.means, means, atol=1e-4, rtol=0)
    assert table.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("clip", [1.0, 3.0])
def test_the_noise_of_a_table_has_the_size_that_the_accountant_assumes(clip, monkeypatch):
    """A sample changes sums (in units of clip) and counts together by a length of √2 at most.

    So the noise on a sum is √2 times the multiplier σ, and on a mean that over the samples. Counts
    alone change by 1.
    """
    draw = np.random.default_rng(0)
    sigma = 3.0
    samples = 4000
    features = torch.zeros(samples, 50)
    labels = torch.zeros(samples, dtype=torch.int64)

    means = [
        release.private_class_means(features, labels, 1, clip, sigma, draw).means for _ in range(40)
    ]
    deviation = clip * 2**0.5 * sigma / samples

    assert float(torch.cat(means).std()) == pytest.approx(deviation, rel=0.05)

    monkeypatch.setattr(release, "bounded_counts", lambda noisy, samples: noisy)
    counts = release.private_counts(torch.full((4000,), samples), sigma, draw)

    assert float(counts.std()) == pytest.approx(sigma, rel=0.05)


def test_a_class_that_nobody_has_is_rarely_told():
    """A class needs a count of two deviations of the noise; however large that, one is told.

    In 50 tables nine absent classes are told in less than 5 % of the cases: chance gives 2.3 %.
    """
    draw = np.random.default_rng(0)
    features = torch.ones(100, 2)
    labels = torch.zeros(100, dtype=torch.int64)

    absent_and_told = 0
    for _ in range(50):
        table = release.private_class_means(features, labels, 10, 1.0, 4.0, draw)
        assert 0 in table.labels
        absent_and_told += len(table) - 1

    assert absent_and_told < 0.05 * 9 * 50

    noisy_table = release.private_class_means(features[:3], labels[:3], 10, 1.0, 500.0, draw)

    assert len(noisy_table) >= 1


def test_noisy_counts_are_of_some_samples_and_of_no_more_than_there_are():
    for seed in range(30):
        draw = np.random.default_rng(seed)
        counts = release.private_counts(torch.tensor([3, 0, 1, 0]), 5.0, draw)

        assert 1 <= int(counts.sum()) <= 4
        assert int(counts.min()) >= 0


@pytest.mark.parametrize("clip", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, 3.4e38])
def test_one_odd_sample_changes_the_table_by_the_length_that_the_noise_is_for(value, clip):
    """Features that are not finite count as zeros; huge ones are cut to the length ``clip``.

    Compared with a sample of zeros, the sums move by no more than that length.
    """

    def sums_with(sample):
        """Return the sums of 50 ordinary samples and this one, in units of clip."""
        features = torch.cat([torch.full((50, 2), clip / 9), torch.tensor([sample])])
        labels = torch.zeros(51, dtype=torch.int64)
        draw = np.random.default_rng(0)
        table = release.private_class_means(features, labels, 1, clip, 1e-9, draw)
        assert table.counts.tolist() == [51]
        return 51 * table.means[0] / clip

    sums = sums_with([0.0, 0.0])

    for sample in ([value, 1.0], [value, value]):
        assert float((sums_with(sample) - sums).norm()) <= 1 + 1e-4


@pytest.mark.parametrize("correct", [{"head": 500}, {"head": 500, "prototype": 700}])
def test_numbers_of_right_predictions_have_noise_for_one_sample_in_each(correct):
    """A sample adds 1 to each of K numbers, √K to the length of all; so the deviation is √K σ."""
    draw = np.random.default_rng(0)
    sigma = 5.0
    drawn = [release.private_correct(correct, 1000, sigma, draw) for _ in range(3000)]
    for kind, hits in correct.items():
        values = [noisy[kind] for noisy in drawn]
        assert np.std(values) == pytest.approx(len(correct) ** 0.5 * sigma, rel=0.05)
        assert np.mean(values) == pytest.approx(hits, abs=0.5)


def test_numbers_of_right_predictions_stay_possible():
    draw = np.random.default_rng(0)
    hits = {release.private_correct({"head": 0}, 3, 9.0, draw)["head"] for _ in range(200)}

    assert hits == {0, 1, 2, 3}
    assert release.private_correct({}, 3, 9.0, draw) == {}


def test_noise_is_not_that_of_a_seed():
    assert release.fresh_draw().random() != release.fresh_draw().random()


F = 5
PARTS = {"shares": 1 / 6, "first": 4 / 6, "second": 1 / 6}
"""The parts that count, sum and second moments have of a sample's squared length, 1."""
Rows = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def released(x_NF, labels_N, clip, noise):
    """Return what a client releases of N samples with F features, as sums in units of ``clip``.

    Second moments, a triangle of a matrix, become the whole matrix.
    """
    moments = ClassMoments(3, F)
    release.private_moments(moments, x_NF, labels_N, clip, noise, release.fresh_draw())

    sums = {}
    units = {"shares": 1.0, "first": clip, "second": clip**2}
    for name, value in moments.named_buffers():
        sums[name] = value.numpy() * len(labels_N) / units[name]

    whole = np.zeros((F, F))
    rows, columns = np.triu_indices(F)
    whole[rows, columns] = sums["second"]
    whole[columns, rows] = sums["second"]
    sums["second"] = whole
    return sums


ODD_SAMPLES = [
    [1e30] * F,
    [np.nan] * F,
    [np.inf, 0, 0, 0, 0],
    [1e-30] * F,
    [9.0, 0, 0, 0, 0],
    [-2.0, 2, -2, 2, 2],
    [0.0] * F,
]


@pytest.mark.parametrize("clip", [0.3, 4.0])
def test_no_sample_changes_class_moments_by_more_than_the_noise_is_for(clip):
    """The search over neighbours comes up to the bound, so the noise is not too large either."""
    torch.manual_seed(1)
    lengths = []
    for trial in range(100):
        length = 4 ** float(torch.randn(()))  # of features, far above ``clip`` or far below
        x_NF = torch.randn(8, F) * length
        labels_N = torch.randint(3, (8,))
        if trial < len(ODD_SAMPLES):
            x_NF[-1] = torch.tensor(ODD_SAMPLES[trial])

        with_last = released(x_NF, labels_N, clip, noise=0.0)
        without_last = released(x_NF[:-1], labels_N[:-1], clip, noise=0.0)

        squared_length = 0.0
        for name, part in PARTS.items():
            squared_length += part * ((with_last[name] - without_last[name]) ** 2).sum()
        lengths.append(np.sqrt(squared_length))

    assert max(lengths) <= 1 + 1e-9
    assert max(lengths) > 0.999


@pytest.mark.slow
def test_the_noise_of_class_moments_has_the_size_that_the_accountant_assumes():
    """A number beside the diagonal stands for two of the symmetric matrix.

    So these have a deviation √½ as large.
    """
    x_NF = torch.zeros(7, F)
    labels_N = torch.zeros(7, dtype=torch.long)
    noise = 2.0
    draws = [released(x_NF, labels_N, 3.0, noise) for _ in range(3000)]
    sums = {name: np.stack([drawn[name] for drawn in draws]) for name in PARTS}
    sums["shares"][:, 0] -= 7  # the samples, all of class 0; without noise all else is 0

    diagonal = np.eye(F, dtype=bool)
    beside = sums["second"][..., ~diagonal].reshape(3000, -1).std(axis=0)
    np.testing.assert_allclose(beside, noise / (PARTS["second"] * 2) ** 0.5, rtol=0.07)
    sums["second"] = sums["second"][..., diagonal]

    for name, part in PARTS.items():
        # 3,000 draws tell a deviation to 1.3 %; the tolerance is five times that
        deviations = sums[name].reshape(3000, -1).std(axis=0)
        np.testing.assert_allclose(deviations, noise / part**0.5, rtol=0.07)
        assert abs(sums[name].mean()) < 0.2  # and the noise is around 0
