"""Masks, and uploads as vectors: what secure aggregation is made of, beside `test_shares.py`."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.exceptions import InvalidTag
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from protofl_common.maths.aggregation import merge_by_class, merge_weights
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy import masks
from protofl_common.privacy import sums as summing
from protofl_common.privacy.shares import SHARE
from protofl_common.wire.payloads import Payload, template_of
from protofl_common.wire.records import SECAGG, Report, digest_of_message
from protofl_common.wire.schema import Counts, Declared, Limits, RefusedMessage, Vectors, Weights

THIS = masks.SumName("signature", 4711, "fedavg", 2)


# -- masks -------------------------------------------------------------------------------------------------------------
def secrets_of(clients: int) -> dict[str, bytes]:
    return {f"site-{i}": hashlib.shake_256(bytes([i])).digest(96) for i in range(clients)}


def test_masks_cancel_in_the_sum_of_all_who_added_them() -> None:
    vectors = np.random.default_rng(0).integers(0, 2**64, (4, 50), dtype=np.uint64)
    secrets = secrets_of(4)
    keys = {site: masks.public_of(secret) for site, secret in secrets.items()}
    sent = {
        site: masks.masked(THIS, v, secrets[site], site, keys, "r")
        for v, site in zip(vectors, secrets, strict=True)
    }
    own = [
        masks.own_mask(THIS, masks.part(secret, masks.OWN), site, 50)
        for site, secret in secrets.items()
    ]
    assert np.array_equal(
        np.add.reduce(list(sent.values())) - np.add.reduce(own), vectors.sum(axis=0)
    )
    other = masks.masked(
        THIS, vectors[0], secrets["site-0"], "site-0", keys, "s"
    )  # of one that has received something else
    assert not (
        other - own[0] + np.add.reduce(list(sent.values())[1:]) - sum(own[1:])
        == vectors.sum(axis=0)
    ).any()
    without = np.add.reduce([sent[f"site-{i}"] for i in range(3)]) - np.add.reduce(own[:3])
    for peer in list(secrets)[:3]:
        without += masks.pair_mask(
            THIS, masks.part(secrets["site-3"], masks.PAIR), "site-3", peer, keys[peer], 50, "r"
        )
    assert np.array_equal(without, vectors[:3].sum(axis=0))


def test_a_masked_vector_looks_uniform() -> None:
    """Chi-square over its bytes; also with the masks of one pair alone. What is masked is anything but uniform."""
    vector, secrets = np.arange(50_000, dtype=np.uint64), secrets_of(3)
    keys = {site: masks.public_of(secret) for site, secret in secrets.items()}

    def p(values: np.ndarray) -> float:
        return float(
            chisquare(np.bincount(np.frombuffer(values.tobytes(), np.uint8), minlength=256)).pvalue
        )

    secret = masks.part(secrets["site-0"], masks.PAIR)
    pair = masks.pair_mask(THIS, secret, "site-0", "site-1", keys["site-1"], len(vector), "r")
    found = [masks.masked(THIS, vector, secrets[site], site, keys, "r") for site in secrets]
    assert all(p(values) > 0.01 for values in (*found, pair))
    assert p(vector) < 1e-9
    assert len({values.tobytes() for values in found}) == 3


def test_a_share_under_way_opens_for_its_receiver_alone_and_keys_that_agree_with_all_are_none() -> (
    None
):
    one, other, third = secrets_of(3).values()
    text = bytes(2 * SHARE)
    sealed = masks.seal(THIS, one, masks.public_of(other), "a", "b", text)
    assert len(sealed) == masks.SEALED
    assert masks.opened(THIS, other, masks.public_of(one), "a", "b", sealed) == text
    next_sum = replace(THIS, number=4)
    for name, secret, way in ((THIS, third, "ab"), (THIS, other, "ba"), (next_sum, other, "ab")):
        with pytest.raises(InvalidTag):
            masks.opened(name, secret, masks.public_of(one), *way, sealed)


def test_keys_that_agree_with_all_or_are_spelt_in_another_way_are_none() -> None:
    keys = masks.public_of(secrets_of(1)["site-0"])
    assert masks.are_keys(keys)
    assert not masks.are_keys(bytes(96))
    for which in range(3):
        start = which * masks.KEY
        same = int.from_bytes(masks.part(keys, which), "little") + 2**255  # X25519 ignores the bit
        spelt = same.to_bytes(masks.KEY, "little")
        assert not masks.are_keys(keys[:start] + spelt + keys[start + masks.KEY :])
    nine = (9 + masks.FIELD).to_bytes(masks.KEY, "little")
    assert not masks.are_keys(nine + keys[masks.KEY :])


def test_a_public_key_has_one_private_key() -> None:
    """Whatever X25519 ignores: masks are made of all bits."""
    secret = masks.part(masks.new_secret(), masks.OWN)
    public = masks.public_of(secret)
    assert masks.is_secret_of(public, secret)
    for place, bit in ((0, 1), (0, 2), (0, 4), (31, 64), (31, 128)):
        same = bytearray(secret)
        same[place] ^= bit
        assert masks.public_of(bytes(same)) == public
        assert not masks.is_secret_of(public, bytes(same))


@pytest.mark.parametrize("which", range(3))
def test_two_sites_with_one_key_are_both_named(which: int) -> None:
    keys = {site: masks.public_of(secret) for site, secret in secrets_of(3).items()}
    assert masks.sharing_a_key(keys) == set()
    start = which * masks.KEY
    copy = masks.part(keys["site-0"], which)
    keys["site-2"] = keys["site-2"][:start] + copy + keys["site-2"][start + masks.KEY :]
    assert masks.sharing_a_key(keys) == {"site-0", "site-2"}
    twice = {"site-1": 3 * masks.part(keys["site-1"], 0)}
    assert masks.sharing_a_key(twice) == {"site-1"}


def test_a_site_that_copies_the_key_of_another_takes_no_mask_away() -> None:
    """The one in the middle of three adds one mask and subtracts one: equal ones would cancel."""
    secrets = secrets_of(3)
    keys = {site: masks.public_of(secret) for site, secret in secrets.items()}
    keys["site-2"] = keys["site-0"]
    vector = np.arange(50, dtype=np.uint64)
    sent = masks.masked(THIS, vector, secrets["site-1"], "site-1", keys, "r")
    own = masks.own_mask(THIS, masks.part(secrets["site-1"], masks.OWN), "site-1", 50)
    assert not (sent - own == vector).any()


@pytest.mark.parametrize("other", [
    {"study": "another"}, {"run_id": 12}, {"algo": "local"}, {"number": 4},
])  # fmt: skip
def test_equal_agreements_give_other_masks_in_every_other_sum(other: dict[str, Any]) -> None:
    secrets = secrets_of(2)
    secret, public = masks.part(secrets["site-0"], masks.PAIR), masks.public_of(secrets["site-1"])
    name = replace(THIS, **other)
    pair, own = (
        [masks.pair_mask(one, secret, "site-0", "site-1", public, 50, "r") for one in (THIS, name)],
        [masks.own_mask(one, secret, "site-0", 50) for one in (THIS, name)],
    )
    assert not (pair[0] == pair[1]).any()
    assert not (own[0] == own[1]).any()


def test_r_u_depends_on_every_record_but_the_peers_shares_and_survives_the_wire() -> None:
    array = Array(dtype="float32", shape=(2, 1), stype="protofl.raw", data=bytes(8))
    content = RecordDict({
        "weights": ArrayRecord({"w": array}),
        "round": ConfigRecord({"round": 2, "run_history": "4711", "part": 1.0}),
        SECAGG: ConfigRecord({"site-0": b"share"}),
    })  # fmt: skip
    digest = digest_of_message(content)
    assert digest_of_message(recorddict_from_proto(recorddict_to_proto(content))) == digest
    assert digest_of_message({**content, SECAGG: ConfigRecord({"site-1": b"other"})}) == digest
    others: list[dict[str, Any]] = [
        {"weights": ArrayRecord({"w": Array("float32", (1, 2), "protofl.raw", bytes(8))})},
        {"weights": ArrayRecord({"w": Array("int64", (2, 1), "protofl.raw", bytes(8))})},
        {"weights": ArrayRecord({"w": Array("float32", (2, 1), "protofl.raw", b"1" + bytes(7))})},
        {"round": ConfigRecord({"round": 2, "run_history": "999:1,4711", "part": 1.0})},
        {"round": ConfigRecord({"round": 2, "run_history": "4711", "part": 0.5})},
        {"best": ConfigRecord({})},
        {"next-sum": ConfigRecord({"site-0": b"key"})},
    ]
    assert len({digest_of_message({**content, **other}) for other in others} | {digest}) == 8


# -- uploads as vectors ------------------------------------------------------------------------------------------------

BN = {
    "w": torch.zeros(2, 3),
    "bn.running_var": torch.ones(2),
    "bn.num_batches_tracked": torch.tensor(3),
}
LIMITS = Limits(5, 3, max_norm=1e4, weights={"weights": template_of(BN)})
UP: Declared = {"weights": Weights(), "prototypes": Vectors(counts=True), "label_counts": Counts()}
values = st.floats(-200, 200, width=32)


@st.composite
def uploads(draw: st.DrawFn) -> tuple[Payload, int]:
    labels = draw(st.lists(st.integers(0, 4), unique=True, max_size=5))
    means = torch.tensor([[draw(values) for _ in range(3)] for _ in labels]).reshape(-1, 3)
    counts = torch.tensor([draw(st.integers(1, 999)) for _ in labels], dtype=torch.int64)
    weights = {
        "w": torch.tensor([draw(values) for _ in range(6)]).reshape(2, 3),
        "bn.running_var": torch.tensor([abs(draw(values)) for _ in range(2)]),
        "bn.num_batches_tracked": torch.tensor(draw(st.integers(0, 9999))),
    }
    prototypes = Prototypes(means, torch.tensor(labels, dtype=torch.int64), counts)
    by_class = torch.bincount(prototypes.labels, counts, minlength=5).long()
    return Payload(weights=weights, prototypes=prototypes, label_counts=by_class), draw(
        st.integers(1, 5000)
    )


@settings(max_examples=40)
@given(st.lists(uploads(), min_size=3, max_size=5))
def test_sums_give_what_the_server_would_have_made_of_the_uploads(
    sent: list[tuple[Payload, int]],
) -> None:
    counted = torch.stack([one.counts("label_counts") for one, _ in sent]).sum(dim=0)
    if not int(counted.sum()):
        return
    sums = np.add.reduce(
        [summing.to_sums(payload, UP, LIMITS, n, len(sent)) for payload, n in sent]
    )
    assert len(sums) == summing.length(UP, LIMITS)
    found, total = summing.from_sums(sums, UP, LIMITS, len(sent))
    assert total == sum(n for _, n in sent)
    wanted = merge_weights(
        [one.weights() or {} for one, _ in sent], [n / total for _, n in sent], "mean", 0.2
    )
    for name, value in (found.weights() or {}).items():
        rounding = 1.001 if name.endswith("tracked") else len(sent) / summing.scale(len(sent))
        assert torch.allclose(value.double(), wanted[name].double(), rtol=1e-6, atol=rounding), name
    merged, seen = merge_by_class([one.vectors() for one, _ in sent], "counts"), found.vectors()
    assert torch.equal(seen.labels, merged.labels)
    assert torch.allclose(
        seen.means, merged.means, rtol=1e-6, atol=len(sent) / summing.scale(len(sent))
    )
    assert torch.equal(seen.counts, counted[seen.labels])
    assert torch.equal(found.counts("label_counts"), counted)


@pytest.mark.parametrize("clients", [3, 1000])
def test_the_largest_sums_do_not_overflow_and_what_is_larger_is_cut(clients: int) -> None:
    up: Declared = {"weights": Weights()}
    limits = Limits(5, 3, weights={"weights": {"w": ("float32", (2,))}})
    one = summing.to_sums(
        Payload(weights={"w": torch.tensor([1e30, -1e30])}), up, limits, 10**12, clients
    )
    found, total = summing.from_sums(one * np.uint64(clients), up, limits, clients)
    assert total == clients * summing.MOST_SAMPLES
    assert (found.weights() or {})["w"].tolist() == [summing.LARGEST, -summing.LARGEST]


def test_a_prototype_is_cut_to_the_length_that_the_server_would_accept_and_none_is_none() -> None:
    up: Declared = {"prototypes": Vectors()}
    sent = Payload(prototypes=Prototypes(torch.tensor([[3e6, 4e6, 0.0]]), torch.tensor([2])))
    found, *_ = summing.from_sums(summing.to_sums(sent, up, LIMITS, 9, 3), up, LIMITS, 3)
    assert torch.allclose(found.vectors().means, torch.tensor([[6e3, 8e3, 0.0]]))
    up = {"prototypes": Vectors(counts=True)}
    none = torch.zeros(0, dtype=torch.int64)
    sums = summing.to_sums(
        Payload(prototypes=Prototypes(torch.zeros(0, 3), none, none)), up, LIMITS, 9, 3
    )
    assert np.array_equal(sums[1:], np.zeros(20, np.uint64))
    assert summing.from_sums(sums, up, LIMITS, 3)[0].vectors() is None
    for odd in (torch.nan, torch.inf):
        broken = Payload(weights=BN | {"w": torch.full((2, 3), odd)})
        with pytest.raises(summing.NotFinite, match="NaN or infinity"):
            summing.to_sums(broken, {"weights": Weights()}, LIMITS, 9, 3)


@pytest.mark.parametrize(("place", "value", "said"), [
    (0, 0.0, "sums of 0 training samples"),
    (0, 2.5, "sums of 2.5 training samples"),
    (0, -3.0, "sums of -3 training samples"),
    (0, 3 * 2.0**20 + 1, "sums of 3.14573e.06 training samples"),
    (2, -1.0, "weights bn.running_var: below 0"),
    (13, 0.5, "prototypes of less than one sample of a class"),
    (13, -2.0, "prototypes of less than one sample of a class"),
    (10, 1e9, "above 10000"),
    (-1, -2.0, "label_counts below 0"),
])  # fmt: skip
def test_sums_that_no_honest_clients_have_are_refused(place: int, value: float, said: str) -> None:
    prototypes = Prototypes(torch.ones(1, 3), torch.tensor([0]), torch.tensor([4]))
    upload = Payload(
        weights=BN, prototypes=prototypes, label_counts=torch.ones(5, dtype=torch.int64)
    )
    sums = summing.to_sums(upload, UP, LIMITS, 1, 3)
    sums[place] = np.array(value * summing.scale(3)).astype(np.int64).view(np.uint64)
    with pytest.raises(RefusedMessage, match=said):
        summing.from_sums(sums, UP, LIMITS, 3)


@pytest.mark.parametrize("k", [1.5, 4.0])
def test_without_counts_a_class_has_at_most_a_vote_of_each_site(k: float) -> None:
    up: Declared = {"prototypes": Vectors()}
    sums = summing.to_sums(
        Payload(prototypes=Prototypes(torch.ones(1, 3), torch.tensor([0]))), up, LIMITS, 9, 3
    )
    sums[4] = summing.to_whole(np.array([k]), 3)[0]
    with pytest.raises(
        RefusedMessage, match="prototypes of a class from more than 3 sites, or from a part of one"
    ):
        summing.from_sums(sums, up, LIMITS, 3)


# -- figures -----------------------------------------------------------------------------------------------------------

NAMES = summing.figure_names(("total",), {"head/auc"})


def reported(tested: int, right: int, **more: Any) -> Report:
    return Report(
        4, 0, tested, {"head": right}, {"total": 0.25}, {"train": 1.5}, {"head/auc": 0.5}, **more
    )


def test_figures_are_means_over_all_samples_and_weigh_at_most_as_uploads() -> None:
    one = reported(10, 7, validation_samples=4, validation={"head": 0.75, "head/auc": 0.5})
    other, without = reported(30, 9), Report(4, 0, 0)
    weighted = [
        summing.weighted_figures(report, n, NAMES)
        for report, n in ((one, 30), (other, 10), (without, 5))
    ]
    sums = np.add.reduce([summing.to_whole(figures, 3) for figures in weighted])
    means = summing.means_of(summing.from_whole(sums, 3), NAMES)
    assert means["correct"] == {"head": 16 / 40}
    assert means["validation"] == {"head": 0.75, "head/auc": 0.5}
    assert means["metrics"] == {"head/auc": 0.5}
    assert means["losses"] == {"total": 0.25}
    assert summing.without_figures(one) == Report(4, 0, 0, seconds={"train": 1.5})
    report = Report(4, 0, 10**9, {"head": 10**9}, {"total": 1e30})
    figures = dict(
        zip(
            NAMES,
            summing.weighted_figures(report, 10**9, NAMES).reshape(-1, 2).tolist(),
            strict=True,
        )
    )
    assert figures["correct.head"] == [summing.MOST_SAMPLES, summing.MOST_SAMPLES]
    assert figures["losses.total"] == [summing.MOST_SAMPLES * summing.LARGEST, summing.MOST_SAMPLES]
    sums = summing.to_whole(
        summing.weighted_figures(Report(4, 0, 3 * 10**6, {"head": 10**6}), 1, NAMES), 3
    )
    assert summing.means_of(summing.from_whole(sums, 3), NAMES)["correct"]["head"] == pytest.approx(
        1 / 3, abs=1e-6
    )
    for odd in (torch.nan, torch.inf):
        with pytest.raises(summing.NotFinite, match=r"losses\.total is (nan|inf)"):
            summing.weighted_figures(
                Report(4, 0, 9, losses={"total": float(odd)}), 9, ["losses.total"]
            )


@pytest.mark.parametrize(("name", "total", "n", "said"), [
    ("correct.head", 2.5, 4, "a sum of 2.5 over 4 samples"),
    ("correct.head", 5, 4, "correct.head of 1.25, outside of 0 to 1"),
    ("validation.head", -1, 4, "outside of 0 to 1"),
    ("metrics.head/auc", 9, 4, "outside of 0 to 1"),
    ("losses.total", 1, 0, "a sum of 1 over 0 samples"),
    ("losses.total", 1, -4, "a sum of 1 over -4 samples"),
    ("losses.total", 1, 2.5, "a sum of 1 over 2.5 samples"),
])  # fmt: skip
def test_figures_that_no_honest_sites_have_are_refused(
    name: str, total: float, n: float, said: str
) -> None:
    sums = np.zeros((len(NAMES), 2))
    sums[NAMES.index(name)] = total, n
    with pytest.raises(RefusedMessage, match=said):
        summing.means_of(sums.ravel(), NAMES)
