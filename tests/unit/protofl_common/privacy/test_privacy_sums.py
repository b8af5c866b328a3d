"""Masks, and uploads as vectors: what secure aggregation is made of, beside `test_shares.py`."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.exceptions import InvalidTag
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from protofl_common.maths.aggregation import MEAN, merge_by_class
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy import masks
from protofl_common.privacy import sums as summing
from protofl_common.privacy.shares import SHARE
from protofl_common.wire.payloads import Payload, template_of
from protofl_common.wire.records import SECAGG, Report, digest_of_message
from protofl_common.wire.schema import Counts, Limits, RefusedMessage, Vectors, Weights

THIS = masks.SumName("signature", 4711, "fedavg", 2)


# -- masks ----------------------------------------------------------------------------------------
def secrets_of(clients):
    """Return each site's three private keys of 32 bytes, always the same ones."""
    return {f"site-{i}": hashlib.shake_256(bytes([i])).digest(96) for i in range(clients)}


def keys_of(secrets):
    return {site: masks.public_of(secret) for site, secret in secrets.items()}


class MaskedSum:
    """Four sites, each with a vector of 50 numbers that it masks for the sum of all.

    ``sent`` are the masked vectors; ``own_masks`` those that a site shares among the others.
    """

    def __init__(self):
        self.vectors = np.random.default_rng(0).integers(0, 2**64, (4, 50), dtype=np.uint64)
        self.secrets = secrets_of(4)
        self.keys = keys_of(self.secrets)
        self.sites = list(self.secrets)
        self.sent = np.stack([self.masked(number, "r") for number in range(4)])
        self.own_masks = np.stack(
            [
                masks.own_mask(THIS, masks.key_of(secret, masks.OWN), site, 50)
                for site, secret in self.secrets.items()
            ]
        )

    def masked(self, number, received):
        """Return what a site sends. Its masks depend on what it has ``received`` (a digest)."""
        site = self.sites[number]
        secret = self.secrets[site]
        return masks.masked(THIS, self.vectors[number], secret, site, self.keys, received)


def test_masks_cancel_in_the_sum_of_all_who_added_them():
    study = MaskedSum()
    total = study.sent.sum(axis=0) - study.own_masks.sum(axis=0)

    assert np.array_equal(total, study.vectors.sum(axis=0))


def test_masks_do_not_cancel_if_a_site_has_received_something_else():
    study = MaskedSum()
    study.sent[0] = study.masked(0, received="s")
    total = study.sent.sum(axis=0) - study.own_masks.sum(axis=0)

    assert not (total == study.vectors.sum(axis=0)).any()


def test_the_secret_of_an_absent_site_takes_its_masks_away():
    """Site-3 has left: the server recomputes the masks that its peers made for it."""
    study = MaskedSum()
    total = study.sent[:3].sum(axis=0) - study.own_masks[:3].sum(axis=0)
    absent = masks.key_of(study.secrets["site-3"], masks.PAIR)
    # the mask that the absent site would have added for a peer is the negative of the peer's own
    for peer in study.sites[:3]:
        total += masks.pair_mask(THIS, absent, "site-3", peer, study.keys[peer], 50, "r")

    assert np.array_equal(total, study.vectors[:3].sum(axis=0))


def p_if_uniform(values):
    """Return the p-value of a χ² test that all 256 bytes are equally likely."""
    frequencies = np.bincount(np.frombuffer(values.tobytes(), np.uint8), minlength=256)
    return float(chisquare(frequencies).pvalue)


def test_a_masked_vector_looks_uniform():
    """The mask of one pair alone looks uniform too, and the vector itself anything but uniform."""
    vector = np.arange(50_000, dtype=np.uint64)
    secrets = secrets_of(3)
    keys = keys_of(secrets)

    assert p_if_uniform(vector) < 1e-9

    sent = [masks.masked(THIS, vector, secrets[site], site, keys, "r") for site in secrets]

    assert all(p_if_uniform(values) > 0.01 for values in sent)
    assert len({values.tobytes() for values in sent}) == 3

    secret = masks.key_of(secrets["site-0"], masks.PAIR)
    pair = masks.pair_mask(THIS, secret, "site-0", "site-1", keys["site-1"], len(vector), "r")

    assert p_if_uniform(pair) > 0.01


def test_a_share_under_way_opens_for_its_receiver_alone():
    """A third site, another direction and another sum cannot open it."""
    sender, receiver, third = secrets_of(3).values()
    public = masks.public_of(sender)
    text = bytes(2 * SHARE)

    sealed = masks.seal(THIS, sender, masks.public_of(receiver), "a", "b", text)

    assert len(sealed) == masks.SEALED
    assert masks.unseal(THIS, receiver, public, "a", "b", sealed) == text
    with pytest.raises(InvalidTag):
        masks.unseal(THIS, third, public, "a", "b", sealed)
    with pytest.raises(InvalidTag):
        masks.unseal(THIS, receiver, public, "b", "a", sealed)
    another_sum = replace(THIS, number=4)
    with pytest.raises(InvalidTag):
        masks.unseal(another_sum, receiver, public, "a", "b", sealed)


def test_a_share_that_does_not_fit_its_digest_is_not_kept():
    """Its receiver would otherwise give it back later, and seem to lie."""
    sender, receiver = secrets_of(2).values()
    of_pair = bytes(SHARE)
    of_own = bytes([1]) * SHARE
    sealed = masks.seal(THIS, sender, masks.public_of(receiver), "a", "b", of_pair + of_own)

    assert masks.is_as_dealt(of_pair, masks.PAIR, sealed)
    assert masks.is_as_dealt(of_own, masks.OWN, sealed)
    assert not masks.is_as_dealt(of_own, masks.PAIR, sealed)

    for place in (-1, -masks.COMMITMENT):  # the digests stand at the end: the last and first byte
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(InvalidTag):
            masks.unseal(THIS, receiver, masks.public_of(sender), "a", "b", bytes(changed))


def test_keys_that_agree_with_all_or_are_spelt_in_another_way_are_none():
    """A key of zeros agrees on the same secret with everybody: no honest site has it.

    Nor may one key have several spellings: two sites with the same key would seem to differ.
    """
    keys = masks.public_of(secrets_of(1)["site-0"])

    assert masks.are_valid_keys(keys)
    assert not masks.are_valid_keys(bytes(96))

    for which in range(3):
        start = which * masks.KEY
        # X25519 ignores the highest bit
        same = int.from_bytes(masks.key_of(keys, which), "little") + 2**255
        spelt = same.to_bytes(masks.KEY, "little")

        assert not masks.are_valid_keys(keys[:start] + spelt + keys[start + masks.KEY :])

    # the key 9, plus p: X25519 takes it for 9
    nine = (9 + masks.FIELD).to_bytes(masks.KEY, "little")
    assert not masks.are_valid_keys(nine + keys[masks.KEY :])


def test_a_public_key_has_one_private_key():
    """Masks are made of all its bits, also of the five that X25519 ignores."""
    secret = masks.key_of(masks.new_secret(), masks.OWN)
    public = masks.public_of(secret)

    assert masks.is_secret_of(public, secret)

    ignored_bits = ((0, 1), (0, 2), (0, 4), (31, 64), (31, 128))  # which byte, which bit of it
    for place, bit in ignored_bits:
        same = bytearray(secret)
        same[place] ^= bit

        assert masks.public_of(bytes(same)) == public
        assert not masks.is_secret_of(public, bytes(same))


@pytest.mark.parametrize("which", range(3))
def test_two_sites_with_one_key_are_both_named(which):
    """``which`` of the three keys of site-2 is a copy of site-0's."""
    keys = keys_of(secrets_of(3))

    assert masks.sites_sharing_a_key(keys) == set()

    start = which * masks.KEY
    copy = masks.key_of(keys["site-0"], which)
    keys["site-2"] = keys["site-2"][:start] + copy + keys["site-2"][start + masks.KEY :]

    assert masks.sites_sharing_a_key(keys) == {"site-0", "site-2"}

    one_for_all_purposes = {"site-1": 3 * masks.key_of(keys["site-1"], 0)}

    assert masks.sites_sharing_a_key(one_for_all_purposes) == {"site-1"}


def test_a_site_that_copies_the_key_of_another_takes_no_mask_away():
    """The one in the middle of three adds one mask and subtracts one: equal ones would cancel."""
    secrets = secrets_of(3)
    keys = keys_of(secrets)
    keys["site-2"] = keys["site-0"]
    vector = np.arange(50, dtype=np.uint64)
    sent = masks.masked(THIS, vector, secrets["site-1"], "site-1", keys, "r")
    own = masks.own_mask(THIS, masks.key_of(secrets["site-1"], masks.OWN), "site-1", 50)

    assert not (sent - own == vector).any()


@pytest.mark.parametrize("other", [
    {"study": "another"}, {"run_id": 12}, {"algo": "local"}, {"number": 4},
])  # fmt: skip
def test_equal_agreements_give_other_masks_in_every_other_sum(other):
    """Two sites always agree on the same secret; study, run, algorithm and number go into masks."""
    secrets = secrets_of(2)
    secret = masks.key_of(secrets["site-0"], masks.PAIR)
    public = masks.public_of(secrets["site-1"])

    def masks_in(name):
        pair = masks.pair_mask(name, secret, "site-0", "site-1", public, 50, "r")
        return pair, masks.own_mask(name, secret, "site-0", 50)

    pair, own = masks_in(THIS)
    other_pair, other_own = masks_in(replace(THIS, **other))

    assert not (pair == other_pair).any()
    assert not (own == other_own).any()


def test_r_u_depends_on_every_record_but_the_peers_shares_and_survives_the_wire():
    """r_u is the digest of what a site u was sent, on which its masks depend."""
    array = Array(dtype="float32", shape=(2, 1), stype="protofl.raw", data=bytes(8))
    content = RecordDict({
        "weights": ArrayRecord({"w": array}),
        "round": ConfigRecord({"round": 2, "run_history": "4711", "part": 1.0}),
        SECAGG: ConfigRecord({"site-0": b"share"}),
    })  # fmt: skip
    digest = digest_of_message(content)

    assert digest_of_message(recorddict_from_proto(recorddict_to_proto(content))) == digest
    assert digest_of_message({**content, SECAGG: ConfigRecord({"site-1": b"other"})}) == digest

    others = [
        {"weights": ArrayRecord({"w": Array("float32", (1, 2), "protofl.raw", bytes(8))})},
        {"weights": ArrayRecord({"w": Array("int64", (2, 1), "protofl.raw", bytes(8))})},
        {"weights": ArrayRecord({"w": Array("float32", (2, 1), "protofl.raw", b"1" + bytes(7))})},
        {"round": ConfigRecord({"round": 2, "run_history": "999:1,4711", "part": 1.0})},
        {"round": ConfigRecord({"round": 2, "run_history": "4711", "part": 0.5})},
        {"best": ConfigRecord({})},
        {"next-sum": ConfigRecord({"site-0": b"key"})},
    ]
    digests = {digest_of_message({**content, **other}) for other in others}

    assert len(digests | {digest}) == len(others) + 1


# -- uploads as vectors ---------------------------------------------------------------------------

BN = {
    "w": torch.zeros(2, 3),
    "bn.running_var": torch.ones(2),
    "bn.num_batches_tracked": torch.tensor(3),
}
LIMITS = Limits(5, 3, max_norm=1e4, weights={"weights": template_of(BN)})
UP = {"weights": Weights(), "prototypes": Vectors(counts=True), "label_counts": Counts()}
values = st.floats(-200, 200, width=32)


@st.composite
def uploads(draw):
    """Draw what a client sends, and its number of training samples."""

    def numbers(length):
        return torch.tensor(draw(st.lists(values, min_size=length, max_size=length)))

    labels = torch.tensor(draw(st.lists(st.integers(0, 4), unique=True, max_size=5))).long()
    counts = torch.tensor([draw(st.integers(1, 999)) for _ in labels]).long()
    payload = Payload(
        weights={
            "w": numbers(6).reshape(2, 3),
            "bn.running_var": numbers(2).abs(),
            "bn.num_batches_tracked": torch.tensor(draw(st.integers(0, 9999))),
        },
        prototypes=Prototypes(numbers(3 * len(labels)).reshape(-1, 3), labels, counts),
        label_counts=torch.bincount(labels, counts, minlength=5).long(),
    )
    return payload, draw(st.integers(1, 5000))


@settings(max_examples=40)
@given(st.lists(uploads(), min_size=3, max_size=5))
def test_sums_give_what_the_server_would_have_made_of_the_uploads(sent):
    """Weights, prototypes and counts read from the sums are those merged from the uploads.

    They agree up to the rounding of the grid.
    """
    clients = len(sent)
    payloads = [payload for payload, _ in sent]
    samples = [n for _, n in sent]
    label_counts = torch.stack([payload.counts("label_counts") for payload in payloads]).sum(dim=0)
    if label_counts.sum() == 0:
        return

    vectors = [summing.to_sums(payload, UP, LIMITS, n, clients) for payload, n in sent]
    sums = np.add.reduce(vectors)

    assert len(sums) == summing.length(UP, LIMITS)

    merged, total = summing.from_sums(sums, UP, LIMITS, clients)

    assert total == sum(samples)

    rounding = clients / summing.scale(clients)  # of each client up to a step of the grid
    shares = [n / total for n in samples]
    weights = MEAN.merge_weights([payload.weights() or {} for payload in payloads], shares)
    for name, value in merged.weights().items():
        atol = 1.001 if name.endswith("tracked") else rounding  # a whole number may be rounded
        wanted = weights[name].double()
        assert torch.allclose(value.double(), wanted, rtol=1e-6, atol=atol), name

    prototypes = merge_by_class([payload.vectors() for payload in payloads], "counts")
    labels = merged.vectors().labels

    assert torch.equal(labels, prototypes.labels)

    means = merged.vectors().means

    assert torch.allclose(means, prototypes.means, rtol=1e-6, atol=rounding)
    assert torch.equal(merged.vectors().counts, label_counts[labels])
    assert torch.equal(merged.counts("label_counts"), label_counts)


@pytest.mark.parametrize("clients", [3, 1000])
def test_the_largest_sums_do_not_overflow(clients):
    """All clients send the largest number, with more samples than may count."""
    up = {"weights": Weights()}
    limits = Limits(5, 3, weights={"weights": {"w": ("float32", (2,))}})
    most = summing.MAX_ADDEND
    huge = Payload(weights={"w": torch.tensor([most, -most])})
    sums = summing.to_sums(huge, up, limits, 10**12, clients) * np.uint64(clients)

    merged, total = summing.from_sums(sums, up, limits, clients)

    assert total == clients * summing.MAX_WEIGHT
    assert merged.weights()["w"].tolist() == [most, -most]


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, 65_537.0, -1e30])
def test_a_site_with_weights_that_do_not_fit_into_a_sum_is_not_in_it(weight):
    """Cut, they would be known to the server, and show what the others sent."""
    diverged = Payload(weights=BN | {"w": torch.tensor([[0.5, weight, 0.0], [0.0, 0.0, 0.0]])})

    with pytest.raises(summing.NotFinite, match="NaN or infinity"):
        summing.to_sums(diverged, {"weights": Weights()}, LIMITS, 9, 3)


def test_a_prototype_is_cut_to_the_length_that_the_server_would_accept():
    """One of length 5·10⁶ becomes one of `LIMITS`' max_norm, 10⁴, in the same direction."""
    up = {"prototypes": Vectors()}
    sent = Payload(prototypes=Prototypes(torch.tensor([[3e6, 4e6, 0.0]]), torch.tensor([2])))
    merged, _ = summing.from_sums(summing.to_sums(sent, up, LIMITS, 9, 3), up, LIMITS, 3)

    assert torch.allclose(merged.vectors().means, torch.tensor([[6e3, 8e3, 0.0]]))


def test_no_prototypes_are_sums_of_nought():
    """An upload without a class adds zeros; a sum of zeros has no prototypes."""
    up = {"prototypes": Vectors(counts=True)}
    none = torch.zeros(0, dtype=torch.int64)
    sent = Payload(prototypes=Prototypes(torch.zeros(0, 3), none, none))
    sums = summing.to_sums(sent, up, LIMITS, 9, 3)

    without_samples = sums[1:]  # 5 counts and 5 · 3 numbers; the first is n
    assert np.array_equal(without_samples, np.zeros(20, np.uint64))
    assert summing.from_sums(sums, up, LIMITS, 3)[0].vectors() is None


@pytest.mark.parametrize(("place", "value", "said"), [
    (0, 0.0, "sums of 0 training samples"),
    (0, 2.5, "sums of 2.5 training samples"),
    (0, -3.0, "sums of -3 training samples"),
    (0, 3 * 2.0**20 + 1, "sums of 3.14573e.06 training samples"),
    (2, -1.0, "weights bn.running_var: below 0"),
    (13, 0.5, "prototypes of less than one sample of a class"),
    (13, -2.0, "prototypes of less than one sample of a class"),
    (10, 1e9, "above 10000"),
    (-1, -2.0, "label_counts: a number of samples is below 0"),
])  # fmt: skip
def test_sums_that_no_honest_clients_have_are_refused(place, value, said):
    """The vector of sums has n, 9 numbers of `BN`, 3 of each class, its count, and label counts.

    The number at ``place`` is replaced by ``value``.
    """
    prototypes = Prototypes(torch.ones(1, 3), torch.tensor([0]), torch.tensor([4]))
    ones = torch.ones(5, dtype=torch.int64)
    upload = Payload(weights=BN, prototypes=prototypes, label_counts=ones)
    sums = summing.to_sums(upload, UP, LIMITS, 1, 3)
    sums[place] = np.array(value * summing.scale(3)).astype(np.int64).view(np.uint64)

    with pytest.raises(RefusedMessage, match=said):
        summing.from_sums(sums, UP, LIMITS, 3)


@pytest.mark.parametrize("votes", [1.5, 4.0])
def test_without_counts_a_class_has_at_most_a_vote_of_each_site(votes):
    """Of three sites; the votes for class 0 are the fifth number, after n and its mean."""
    up = {"prototypes": Vectors()}
    sent = Payload(prototypes=Prototypes(torch.ones(1, 3), torch.tensor([0])))
    sums = summing.to_sums(sent, up, LIMITS, 9, 3)
    sums[4] = summing.to_whole(np.array([votes]), 3)[0]
    said = "prototypes of a class from more than 3 sites, or from a part of one"

    with pytest.raises(RefusedMessage, match=said):
        summing.from_sums(sums, up, LIMITS, 3)


# -- figures --------------------------------------------------------------------------------------

NAMES = summing.figure_names(("total",), {"head/auc"})


def means_of(*reports):
    """Return the figures that the server has of three sites' reports.

    Each report comes with the number of the site's training samples.
    """
    figures = [summing.weighted_figures(report, n, NAMES) for report, n in reports]
    sums = np.add.reduce([summing.to_whole(of_site, 3) for of_site in figures])
    return summing.means_of(summing.from_whole(sums, 3), NAMES)


def test_figures_are_means_over_all_samples():
    """Test figures weigh by test samples, losses by training samples."""
    validated = {"validation_samples": 4, "validation": {"head": 0.75, "head/auc": 0.5}}
    figures = {"losses": {"total": 0.25}, "metrics": {"head/auc": 0.5}}
    # round 4; the number of training samples is not in the report, that of test samples is
    first = Report(4, 0, 10, {"head": 7}, seconds={"train": 1.5}, **figures, **validated)
    second = Report(4, 0, 30, {"head": 9}, losses={"total": 0.75}, metrics={"head/auc": 0.75})
    without = Report(4, 0, 0)

    means = means_of((first, 30), (second, 10), (without, 5))

    assert means["correct"] == {"head": 16 / 40}
    assert means["validation"] == {"head": 0.75, "head/auc": 0.5}
    assert means["metrics"] == {"head/auc": (10 * 0.5 + 30 * 0.75) / 40}
    assert means["losses"] == {"total": (30 * 0.25 + 10 * 0.75) / 40}
    assert summing.without_figures(first) == Report(4, 0, 0, seconds={"train": 1.5})


def test_figures_weigh_at_most_as_uploads():
    """Larger ones are cut, and a share of right predictions stays what it is."""
    huge = Report(4, 0, 10**9, {"head": 10**9}, {"total": 1e30})
    sums_and_weights = summing.weighted_figures(huge, 10**9, NAMES).reshape(-1, 2).tolist()
    figures = dict(zip(NAMES, sums_and_weights, strict=True))

    assert figures["correct.head"] == [summing.MAX_WEIGHT, summing.MAX_WEIGHT]
    assert figures["losses.total"] == [summing.MAX_WEIGHT * summing.MAX_ADDEND, summing.MAX_WEIGHT]

    third = Report(4, 0, 3 * 10**6, {"head": 10**6})

    assert means_of((third, 1))["correct"]["head"] == pytest.approx(1 / 3, abs=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_that_are_not_finite_are_not_summed(value):
    report = Report(4, 0, 9, losses={"total": value})
    with pytest.raises(summing.NotFinite, match=r"losses\.total is (nan|inf)"):
        summing.weighted_figures(report, 9, ["losses.total"])


@pytest.mark.parametrize(("name", "total", "n", "said"), [
    ("correct.head", 2.5, 4, "a sum of 2.5 over 4 samples"),
    ("correct.head", 5, 4, "correct.head of 1.25, outside of 0 to 1"),
    ("validation.head", -1, 4, "outside of 0 to 1"),
    ("metrics.head/auc", 9, 4, "outside of 0 to 1"),
    ("losses.total", 1, 0, "a sum of 1 over 0 samples"),
    ("losses.total", 1, -4, "a sum of 1 over -4 samples"),
    ("losses.total", 1, 2.5, "a sum of 1 over 2.5 samples"),
])  # fmt: skip
def test_figures_that_no_honest_sites_have_are_refused(name, total, n, said):
    """``total`` is the sum of a figure, ``n`` that of its weights."""
    sums = np.zeros((len(NAMES), 2))
    sums[NAMES.index(name)] = total, n

    with pytest.raises(RefusedMessage, match=said):
        summing.means_of(sums.ravel(), NAMES)
