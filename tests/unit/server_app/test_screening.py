"""Who is asked; what is out of proportion, from three replies on.

And what a site may claim after its introduction.
"""

import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report, SiteCard
from protofl_common.wire.schema import Moments, RefusedMessage
from server_app.network.admission import sample_sites
from server_app.protections.outliers import outliers
from server_app.protections.samples import bound_samples, most_samples
from server_app.run.bounds import Bounds
from server_app.run.replies import check_claims
from tests.support.fakes import server_of, upload

CARD = SiteCard(
    "north", 0, 3, "", "cnn4", (1, 8, 8), 99, 30, 20, ("zero", "one", "two"), (0, 2), "", "cpu"
)
"""A site that joined with 30 training and 20 test samples, of classes 0 and 2 of three."""


def of_norm(norm):
    """Return prototypes of class 0, of length 1, and of class 2, of length ``norm``."""
    means = torch.tensor([[0.0, 1.0], [0.0, norm]])
    return Payload(prototypes=Prototypes(means, torch.tensor([0, 2])))


def of_weights(value, counter=0):
    """Return a model of four equal weights, whose norm is twice their value, and a buffer."""
    model = {"w": torch.full((4,), value), "seen": torch.tensor(counter)}
    return Payload(weights=model)


def test_an_upload_far_above_the_median_of_three_or_more_is_an_outlier():
    """The upload is named with its length and the median, of which the limit is a multiple."""
    payloads = {"a": of_norm(2), "b": of_norm(4), "c": of_norm(2001)}

    said = "prototypes of norm 2e+03, above 500 times the round's median of 4 (max-norm-ratio)"
    assert outliers(payloads, 500) == {"c": said}
    assert outliers(payloads, 501) == {}

    of_two = {"a": of_norm(2), "c": of_norm(1e9)}
    assert outliers(of_two, 500) == {}, "of two none is out of proportion"


def test_uploads_of_zeros_only_are_no_measure_of_the_others():
    """The median is that of the lengths above zero, if there are three."""
    payloads = {name: of_weights(0.0) for name in "defgh"}
    payloads["a"] = of_weights(1.0)
    assert outliers(payloads, 5) == {}

    payloads["b"] = of_weights(1.0)
    payloads["c"] = of_weights(10.0)
    assert list(outliers(payloads, 5)) == ["c"]


def test_the_norm_of_weights_leaves_out_whole_numbers():
    """The second model's counter is huge, and the third model is the one that is named."""
    payloads = {
        "a": of_weights(1.0, counter=9),
        "b": of_weights(2.0, counter=10**9),
        "c": of_weights(-3000.0, counter=9),
    }

    said = "weights of norm 6e+03, above 1000 times the round's median of 4 (max-norm-ratio)"
    assert outliers(payloads, 1000) == {"c": said}


def prototypes(counts=(9, 21), labels=(0, 2)):
    """Return prototypes; by default of the classes and samples that the site joined with."""
    means = torch.ones(len(labels), 2)
    return Payload(prototypes=Prototypes(means, torch.tensor(labels), torch.tensor(counts)))


def label_counts(*counts):
    return Payload(label_counts=torch.tensor(counts))


def moments(*shares):
    payload = Payload(moments={"shares": torch.tensor(shares, dtype=torch.float64)})
    payload.declared = {"moments": Moments()}
    return payload


OF_ANOTHER = "samples of a class that it did not declare when it joined"
MORE = "counts of 31 samples, but it has 30"
OVERFLOW = "counts of 1.84467e+19"


@pytest.mark.parametrize(("payload", "report", "said"), [
    (prototypes(), {}, ""),
    (prototypes((9, 20)), {"train_samples": 29, "test_samples": 0}, ""),
    (prototypes(), {"train_samples": 31}, "train_samples = 31, but it joined with 30"),
    (prototypes(), {"test_samples": 21}, "test_samples = 21, but it joined with 20"),
    (Payload(), {"validation_samples": 1}, "validation_samples = 1, but it joined with 0"),
    (prototypes(labels=(0, 1)), {}, "did not declare when it joined: one"),
    (prototypes((9, 22)), {}, MORE),
    (prototypes((2**63 - 1, 2**63 - 1)), {}, OVERFLOW),
    (prototypes(), {"train_samples": 0}, "without training samples"),
    (prototypes((1, 0)), {"train_samples": 1}, "2 prototypes, more than its 1 training samples"),
    (label_counts(9, 0, 21), {}, ""),
    (label_counts(9, 1, 20), {}, OF_ANOTHER),
    (label_counts(9, 0, 22), {}, MORE),
    (label_counts(2**63 - 1, 0, 2**63 - 1), {}, OVERFLOW),
    (moments(0.3, 0.0, 0.7), {}, ""),
    (moments(0.3, 0.1, 0.6), {}, OF_ANOTHER),
    (moments(19.0, 0.0, 13.0), {}, ""),  # with noise, which only their codec can judge
])  # fmt: skip
def test_a_site_is_held_to_its_introduction(payload, report, said):
    """It joined with classes 0 and 2, 30 training samples and 20 test samples.

    ``said``: the reason of the refusal, or "" where the claims are taken.
    """
    as_it_joined = {"round": 1, "train_samples": 30, "test_samples": 20}
    claims = Report(**as_it_joined | report)
    refusal = pytest.raises(RefusedMessage, match=re.escape(said)) if said else nullcontext()
    with refusal:
        check_claims(claims, payload, CARD, training=True)


def server_of_north():
    """Return the server of a run with a single site, which has 30 samples."""
    server = server_of("fedproto")
    server.federation.bounds = Bounds(max_samples_ratio=2.0, max_samples_lead=2.0)
    server.federation.cards = {"north": CARD}
    return server


@pytest.mark.parametrize(("samples", "warnings"), [
    (30, set()),
    (0, set()),  # a sum of masked uploads tells it later
    (29, {"north: 29 training samples, but it joined with 30: its data have changed"}),
])  # fmt: skip
def test_fewer_samples_than_a_site_joined_with_are_worth_a_warning(samples, warnings):
    """Its data have changed, and are divided anew: it may be tested on what it was trained on."""
    sent = [upload("north", samples)]

    reduced = bound_samples(sent, server_of_north()).reduced

    assert {text.partition(", and")[0] for text in reduced} == warnings


LIMITS = Bounds(max_samples_ratio=8.0, max_samples_lead=2.0)
"""At most 8 times the median claim, and twice the largest claim but those of the liars.

At least one is taken for a liar's.
"""


@pytest.mark.parametrize(("claims", "liars", "most"), [
    ([30, 30, 40, 10**15], 0, (80.0, "max-samples-lead")),
    ([30, 30, 30, 10**15, 10**15], 0, (240.0, "max-samples-ratio")),  # each hides the other's lead
    ([30, 30, 30, 10**15, 10**15], 2, (60.0, "max-samples-lead")),
    ([30, 10**15], 0, (240.0, "max-samples-ratio")),  # nobody tells the two apart
    ([0, 0, 0, 5], 0, (1.0, "max-samples-lead")),  # one sample may always count
])  # fmt: skip
def test_most_samples_that_a_claim_may_weigh(claims, liars, most):
    """``most``: the smaller of both limits, and the setting that gives it."""
    assert most_samples(claims, replace(LIMITS, liars=liars)) == most


def test_without_bounds_nothing_limits_a_claim_among_clients_that_have_none():
    """Infinity times the median claim of 0 is not a number, which would be the least limit."""
    most, _ = most_samples([0, 0, 500], Bounds())

    assert most == math.inf


def test_label_counts_weigh_no_more_than_the_settings_say():
    """A claim of 3 · 10⁹ samples is cut to 60, twice the usual 30, in the same proportions."""
    claimed = torch.tensor([10**9, 0, 2 * 10**9])
    sent = [upload("north", 3 * 10**9, label_counts=claimed)]

    (accepted,) = bound_samples(sent, server_of_north()).kept

    assert accepted.payload.counts("label_counts").tolist() == [20, 0, 40]


SITES = [f"site-{i}" for i in range(20)]


def test_seed_and_round_alone_choose_the_sites_whatever_their_order():
    """Two seeds draw six of twenty sites in five rounds, each time others."""
    assert sample_sites(reversed(SITES), 1.0, 42, 1) == SITES
    drawn = sample_sites(SITES, 0.3, 42, 5)
    assert sample_sites(reversed(SITES), 0.3, 42, 5) == drawn

    samples = set()
    for seed in (1, 2):
        for number in range(1, 6):
            drawn = sample_sites(SITES, 0.3, seed, number)
            samples.add(tuple(drawn))
    assert len(samples) == 10


def test_a_fraction_of_the_sites_is_at_least_one_or_as_many_as_are_asked_for():
    assert len(sample_sites(SITES, 0.3, 0, 1)) == 6
    assert len(sample_sites(SITES, 0.001, 0, 1)) == 1
    assert len(sample_sites(SITES, 0.001, 0, 1, fewest=2)) == 2
    assert sample_sites(["only"], 0.5, 0, 1, fewest=2) == ["only"]


def test_in_many_rounds_every_site_is_asked_about_as_often():
    """A quarter of the sites in each of 1,000 rounds is 250 times each."""
    asked = Counter()
    for number in range(1000):
        asked.update(sample_sites(SITES, 0.25, 0, number))

    # 250, and more than three deviations of 14
    assert min(asked.values()) > 200
    assert max(asked.values()) < 300
