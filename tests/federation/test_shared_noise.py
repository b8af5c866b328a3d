"""Sites that share the noise of a sum: ``dp-honest-sites`` (gaussian heads, secure aggregation)."""

import math

import numpy as np
import pytest
import torch

from client_app.protections import differential_privacy, secure_sum
from protofl_common.experiment.settings import Settings
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.privacy import release, sums
from protofl_common.privacy.plan import Plan
from tests.support.harness import (
    failures_in,
    refusal,
    rows_without_a_reply,
    run_config,
    run_federation,
)

SITES = 4
PRIVATE = {
    "algo": "gaussian",
    "dataset": "digits",
    "partition": "iid",
    "backbones": "glyphs",
    "rounds": 1,
    "dp": "sample",
    "dp_epsilon": 2.0,
    "secagg": True,
}


def test_the_sum_has_the_noise_of_one_site_and_the_ledger_the_epsilon_of_the_sum(
    tmp_path, monkeypatch
):
    """Each of four sites adds so much noise that three honest ones (dp-honest-sites) are enough.

    Variances of independent noise add up: those of three sites' noise to the planned one. All that
    is summed lies on the grid of the noise. ε and accuracy are shown.
    """
    drawn = []  # the noise multiplier of each site
    measure = release.private_moments
    steps = []  # of the grid, for each site
    to_sums = sums.to_sums

    def noted_step(*arguments):
        *_, step = arguments
        steps.append(step)
        return to_sums(*arguments)

    def noted(*arguments):
        _moments, _features, _labels, _clip, noise, _draw = arguments
        drawn.append(noise)
        measure(*arguments)

    monkeypatch.setattr(differential_privacy.release, "private_moments", noted)
    monkeypatch.setattr(secure_sum.sums, "to_sums", noted_step)
    config = run_config(tmp_path, **PRIVATE, dp_honest_sites=SITES - 1)
    outcome = run_federation(config, clients=SITES)

    plan = Settings.from_run_config(config).plan(100)  # its table noise is that of any number
    assert isinstance(plan, Plan)
    assert len(drawn) == SITES
    assert steps[:SITES] == SITES * [release.finest_unit_of_moments(clip=1.0)]
    honest = drawn[: SITES - 1]
    assert math.sqrt(sum(noise**2 for noise in honest)) == pytest.approx(plan.table_noise)
    assert not outcome.trouble
    assert outcome.summary["epsilon"] <= 2.0
    assert 0 <= outcome.summary["accuracy"]["head"]["mean"] <= 1


@pytest.mark.parametrize(("clip", "samples"), [
    (1.0, [37, 61, 50]),
    (3.7, [37, 61, 50]),
    (250.0, [99_991, 61, 50]),  # n · w of a large mean w is a little off a whole step
])  # fmt: skip
def test_a_sum_adds_up_what_sites_send_to_the_step(clip, samples):
    """The sum of what sites send is exactly the sum of their noisy moments, n · w of each.

    Each kind of moments has its own unit, and its sums and their noise are whole multiples of it.
    What is sent is rounded to the finest of these units, which divides them all, so that rounding
    changes nothing and shows nothing beside the noise.
    """
    torch.manual_seed(0)
    noise_multiplier = 3.0
    finest_unit = release.finest_unit_of_moments(clip)
    totals = {}
    exact = {}
    for n in samples:  # of one site each
        moments = ClassMoments(3, 5)  # of three classes, in five features
        features = torch.randn(n, 5) * 2 * clip  # many are longer than ``clip``
        labels = torch.arange(n) % 3
        draw = release.fresh_draw()
        release.private_moments(moments, features, labels, clip, noise_multiplier, draw)
        for name, mean in moments.named_buffers():
            whole = sums.to_whole((n * mean).numpy(), len(samples), finest_unit)
            totals[name] = totals.get(name, 0) + whole
            unit = release.unit_of_moments(name, clip)
            exact[name] = exact.get(name, 0) + np.rint((n * mean / unit).numpy()) * unit
    for name, total in totals.items():
        np.testing.assert_array_equal(sums.from_whole(total, len(samples)), exact[name])


def test_figures_are_cut_in_the_sum_and_not_before():
    """One of four predictions is right, with noise of 9: a single client's number is from 0 to 4.

    In a sum, where a client adds half of the noise, it may lie outside; the mean may not.
    """
    draw = np.random.default_rng(0)

    def noisy_correct(part):
        return release.private_correct({"head": 1}, 4, noise=9.0, draw=draw, part=part)["head"]

    alone = [noisy_correct(part=1.0) for _ in range(200)]
    shared = [noisy_correct(part=0.5) for _ in range(2000)]
    assert min(alone) == 0
    assert max(alone) == 4
    assert min(shared) < 0
    assert max(shared) > 4
    assert np.std(shared) == pytest.approx(0.5 * 9, rel=0.1)

    figures = np.array([[-3.0, 4.0]])  # -3 right predictions of 4 samples
    names = ["correct.head"]
    assert sums.means_of(figures, names, noisy=True)["correct"]["head"] == 0
    with pytest.raises(ValueError, match="outside of 0 to 1"):
        sums.means_of(figures, names)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"secagg": False}, "a server that sees single uploads sees a part of the noise"),
    ({"algo": "fedavg", "norm": "group"}, "fedavg trains by private steps"),
    ({"dp": "none", "dp_epsilon": 8.0}, "with dp = 'none' there is no noise to share"),
])  # fmt: skip
def test_noise_is_shared_only_where_the_sum_is_all_that_is_seen(changes, reason, tmp_path):
    settings = PRIVATE | {"dp_honest_sites": 3} | changes
    refused = refusal(run_config(tmp_path, **settings))
    assert "dp-honest-sites = 3" in refused
    assert reason in refused


@pytest.mark.parametrize(("changes", "reason"), [
    ({"dp_honest_sites": SITES}, "with secagg-threshold = 0.67 a sum may have 3 sites"),
    ({"dp_honest_sites": 3, "dp_feature_clip": 1e-5}, "too coarse for the noise"),
    ({"dp_honest_sites": 3, "dp_feature_clip": 65.0}, "too large for a sum; choose 64 at most"),
])  # fmt: skip
def test_a_site_takes_no_part_in_a_sum_that_would_not_hide_enough(changes, reason, tmp_path):
    """Fewer honest sites than counted on may be left, or numbers do not fit the noise's grid."""
    rows = rows_without_a_reply(run_config(tmp_path, **PRIVATE | changes), SITES)
    assert all(reason in text for text in failures_in(rows))


def test_a_site_whose_noise_would_weigh_less_than_its_samples_takes_no_part(tmp_path, monkeypatch):
    """A site with more samples than the largest weight in a sum, usually a million, is scaled down.

    Its noise would be scaled down with its samples. Here the largest weight is 20.
    """
    monkeypatch.setattr(secure_sum, "MAX_WEIGHT", 20)
    rows = rows_without_a_reply(run_config(tmp_path, **PRIVATE, dp_honest_sites=3), SITES)
    assert "its part of the noise would be too small" in str(rows[0]["failed"])


def test_a_site_counts_on_others_only_where_its_operator_has_said_so(tmp_path):
    """A run with dp-honest-sites = 3 needs max-honest-sites = 3 in the node config."""
    config = run_config(tmp_path, **PRIVATE, dp_honest_sites=3)
    site = {"partition-id": 0, "num-partitions": SITES, "site-name": "north"}
    refused = refusal(config, site)
    assert "max-honest-sites" in refused
    Settings.from_run_config(config, site | {"max-honest-sites": 3})
