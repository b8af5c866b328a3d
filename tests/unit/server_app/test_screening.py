"""Who is asked; what is out of proportion, from three replies on.

And what a site may claim after its introduction.
"""

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
from server_app.protections.base import View
from server_app.protections.outliers import outliers
from server_app.protections.samples import BoundSamples, most_samples
from server_app.round import view_of
from server_app.run.bounds import Bounds
from server_app.run.replies import Upload, check_claims
from tests.support.fakes import server_of

CARD = SiteCard(
    "north", 0, 3, "", "cnn4", (1, 8, 8), 99, 30, 20, ("zero", "one", "two"), (0, 2), "", "cpu"
)


def of_norm(norm: float) -> Payload:
    return Payload(
        prototypes=Prototypes(torch.tensor([[0.0, 1.0], [0.0, norm]]), torch.tensor([0, 2]))
    )


def test_far_above_the_median_of_three_or_more() -> None:
    payloads = {"a": of_norm(2), "b": of_norm(4), "c": of_norm(2001)}
    said = "prototypes of norm 2e+03, above 500 times the round's median of 4 (max-norm-ratio)"

    assert outliers(payloads, 500) == {"c": said}
    assert outliers(payloads, 501) == {}
    assert outliers({"a": of_norm(2), "c": of_norm(1e9)}, 500) == {}

    zeros = {name: Payload(weights={"w": torch.zeros(1)}) for name in "defgh"}
    assert outliers(zeros | {"a": Payload(weights={"w": torch.ones(1)})}, 5) == {}

    ones = {
        name: Payload(weights={"w": torch.full((1,), 1.0 + 9 * (name == "c"))}) for name in "abc"
    }

    assert list(outliers(zeros | ones, 5)) == ["c"]

    models = {"a": (1.0, 9), "b": (2.0, 10**9), "c": (-3000.0, 9)}  # of four weights and a counter
    weights = {
        name: {"w": torch.full((4,), w), "seen": torch.tensor(seen)}
        for name, (w, seen) in models.items()
    }
    payloads = {name: Payload(weights=one) for name, one in weights.items()}
    said = "weights of norm 6e+03, above 1000 times the round's median of 4 (max-norm-ratio)"

    assert outliers(payloads, 1000) == {"c": said}


def prototypes(counts: tuple[int, ...] = (9, 21), labels: tuple[int, ...] = (0, 2)) -> Payload:
    return Payload(
        prototypes=Prototypes(
            torch.ones(len(labels), 2), torch.tensor(labels), torch.tensor(counts)
        )
    )


def label_counts(*counts: int) -> Payload:
    return Payload(label_counts=torch.tensor(counts))


def moments(*shares: float) -> Payload:
    payload = Payload(moments={"shares": torch.tensor(shares, dtype=torch.float64)})
    payload.declared = {"moments": Moments()}
    return payload


OF_ANOTHER, MORE = (
    "samples of a class that it did not declare when it joined",
    "counts of 31 samples, but it has 30",
)
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
def test_a_site_is_held_to_its_introduction(
    payload: Payload, report: dict[str, int], said: str
) -> None:
    claims = Report(**{"round": 1, "train_samples": 30, "test_samples": 20} | report)
    with pytest.raises(RefusedMessage, match=re.escape(said)) if said else nullcontext():
        check_claims(claims, payload, CARD, training=True)


def view_of_north() -> View:
    """What protections know of a round with a single site, which has 30 samples."""
    bounds = Bounds(max_samples_ratio=2.0, max_samples_lead=2.0)
    return replace(view_of(server_of("fedproto")), bounds=bounds, cards={"north": CARD})


def test_fewer_samples_than_a_site_joined_with_are_worth_a_warning() -> None:
    """The others are divided anew: half of what it is tested on was trained on before."""
    for samples, warnings in (
        (30, set()),
        (0, set()),  # a sum of masked uploads tells it later
        (29, {"north: 29 training samples, but it joined with 30: its data have changed"}),
    ):
        upload = Upload("north", Payload(), Report(1, samples, 0))
        reduced = BoundSamples().accept([upload], view_of_north()).reduced
        assert {text.partition(", and")[0] for text in reduced} == warnings


def test_a_single_claim_leads_the_next_and_label_counts_weigh_no_more_than_the_settings_say() -> (
    None
):
    """Two have nobody to tell them apart; more liars than expected are left to the median."""
    limits = Bounds(max_samples_ratio=8.0, max_samples_lead=2.0)
    assert most_samples([30, 30, 40, 10**15], limits) == (80.0, "max-samples-lead")
    assert most_samples([30, 30, 30, 10**15, 10**15], limits) == (240.0, "max-samples-ratio")
    assert most_samples([30, 30, 30, 10**15, 10**15], replace(limits, liars=2)) == (
        60.0,
        "max-samples-lead",
    )
    assert most_samples([30, 10**15], limits) == (240.0, "max-samples-ratio")
    assert most_samples([0, 0, 0, 5], limits)[0] == 1.0

    upload = Upload(
        "north", Payload(label_counts=torch.tensor([10**9, 0, 2 * 10**9])), Report(1, 3 * 10**9, 0)
    )
    (found,) = BoundSamples().accept([upload], view_of_north()).kept
    counts = found.payload.counts("label_counts")

    assert counts.tolist() == [20, 0, 40]  # 60 samples at most, twice the usual 30


SITES = [f"site-{i}" for i in range(20)]


def test_seed_and_round_alone_choose_the_sites_whatever_their_order() -> None:
    assert sample_sites(reversed(SITES), 1.0, 42, 1) == SITES
    assert sample_sites(SITES, 0.3, 42, 5) == sample_sites(reversed(SITES), 0.3, 42, 5)
    assert (
        len(
            {
                tuple(sample_sites(SITES, 0.3, seed, number))
                for seed in (1, 2)
                for number in range(1, 6)
            }
        )
        == 10
    )
    assert len(sample_sites(SITES, 0.3, 0, 1)) == 6
    assert len(sample_sites(SITES, 0.001, 0, 1)) == 1
    assert sample_sites(["only"], 0.5, 0, 1, least=2) == ["only"]
    assert len(sample_sites(SITES, 0.001, 0, 1, least=2)) == 2

    counts = Counter(
        site for number in range(1000) for site in sample_sites(SITES, 0.25, 0, number)
    )

    assert min(counts.values()) > 200
    assert max(counts.values()) < 300
