"""The wire: everything declared survives a round trip, everything else is refused with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from protofl_common.catalog import CATALOG, Crossing
from protofl_common.lineage import Lineage
from protofl_common.messages import (
    RAW,
    Instructions,
    Limits,
    Payload,
    RefusedMessage,
    Report,
    SiteCard,
    pack_instructions,
    pack_payload,
    pack_report,
    pack_site_card,
    payload_bytes,
    template_of,
    unpack_instructions,
    unpack_payload,
    unpack_report,
    unpack_site_card,
)
from protofl_common.prototypes import Prototypes

UP = Crossing(prototypes=True, counts=True)
LIMITS = Limits(num_classes=10, feature_dim=3, max_norm=100.0)
LOSSES = CATALOG["fedproto"].reported_losses
REPORT = Report(2, 30, 20, {"head": 11}, {"total": 0.5, "cross-entropy": 0.5}, {"train": 1.5})


def honest() -> RecordDict:
    means = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    content = pack_payload(Payload(Prototypes(means, torch.tensor([7, 2]), torch.tensor([5, 9]))), UP)
    content["report"] = pack_report(REPORT, LOSSES)
    return content


def some_payload(crossing: Crossing) -> Payload:
    prototypes = weights = None
    sets: tuple[Prototypes, ...] = ()
    if crossing.prototypes:
        counts = torch.tensor([5, 9]) if crossing.counts else None
        labels = torch.tensor([9, 9]) if crossing.many_per_class else torch.tensor([0, 9])
        prototypes = Prototypes(torch.randn(2, 3), labels, counts)
    if crossing.local_sets:
        sets = tuple(Prototypes(torch.randn(rows, 3), torch.arange(rows)) for rows in (2, 1, 3))
    if crossing.weights:
        weights = {"head.weight": torch.randn(10, 3), "body.1.num_batches_tracked": torch.tensor(4)}
    return Payload(prototypes, weights, sets)


@pytest.mark.parametrize("algo", CATALOG)
@pytest.mark.parametrize("way", ["down", "up"])
def test_every_declared_payload_survives_a_round_trip(algo: str, way: str) -> None:
    crossing = getattr(CATALOG[algo], way)
    sent = some_payload(crossing)
    limits = Limits(10, 3, 100.0, template_of(sent.weights or {}))
    got = unpack_payload(pack_payload(sent, crossing), crossing, limits, required=True)
    if sent.prototypes is not None:
        assert got.prototypes is not None
        assert torch.equal(got.prototypes.means, sent.prototypes.means)
        assert torch.equal(got.prototypes.labels, sent.prototypes.labels)
        assert (got.prototypes.counts is None) == (sent.prototypes.counts is None)
    assert len(got.local_sets) == len(sent.local_sets)
    for ours, theirs in zip(got.local_sets, sent.local_sets, strict=True):
        assert torch.equal(ours.means, theirs.means)
        assert torch.equal(ours.labels, theirs.labels)
    if sent.weights is not None:
        assert got.weights is not None
        assert all(torch.equal(got.weights[name], value) for name, value in sent.weights.items())


@pytest.mark.parametrize("algo", CATALOG)
def test_nothing_undeclared_can_be_packed(algo: str) -> None:
    row = CATALOG[algo]
    everything = some_payload(Crossing(prototypes=True, counts=True, weights=True))
    assert everything.prototypes is not None
    several = Prototypes(torch.randn(2, 3), torch.tensor([4, 4]))
    for crossing in (row.down, row.up):
        if not crossing.weights:
            with pytest.raises(ValueError, match="weights are not declared"):
                pack_payload(Payload(weights=everything.weights), crossing)
        if not crossing.counts:
            with pytest.raises(ValueError, match="not declared"):
                pack_payload(Payload(prototypes=everything.prototypes), crossing)
        if not crossing.many_per_class:
            with pytest.raises(ValueError, match="not declared"):
                pack_payload(Payload(prototypes=several), crossing)
        if not crossing.local_sets:
            with pytest.raises(ValueError, match="not declared"):
                pack_payload(Payload(local_sets=(everything.prototypes.without_counts(),)), crossing)


def test_prototypes_cost_four_bytes_a_number_plus_labels_and_counts() -> None:
    assert payload_bytes(honest()) == 2 * 3 * 4 + 2 * 8 + 2 * 8


def raw(values: np.ndarray) -> Array:
    return Array(dtype=str(values.dtype), shape=values.shape, stype=RAW, data=values.tobytes())


def with_array(name: str, values: np.ndarray) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content.array_records["prototypes"][name] = raw(values)

    return change


def bad_stype(content: RecordDict) -> None:
    content.array_records["prototypes"]["means"] = Array(np.zeros((2, 3), np.float32))


def short_data(content: RecordDict) -> None:
    content.array_records["prototypes"]["means"] = Array("float32", (2, 3), RAW, b"1234")


def negative_shape(content: RecordDict) -> None:
    content.array_records["prototypes"]["means"] = Array("float32", (-2, 3), RAW, b"")


def huge_shape(content: RecordDict) -> None:
    content.array_records["prototypes"]["means"] = Array("float32", (10**9, 3), RAW, b"1234")


def extra_array(content: RecordDict) -> None:
    content.array_records["prototypes"]["secret"] = raw(np.zeros(3, np.float32))


def smuggled_weights(content: RecordDict) -> None:
    content["weights"] = ArrayRecord({"w": raw(np.zeros(3, np.float32))})


def no_prototypes(content: RecordDict) -> None:
    del content["prototypes"]


BAD_PAYLOADS: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "wrong dimension": (with_array("means", np.zeros((2, 4), np.float32)), "shape 2×4 instead of 2×3"),
    "wrong rank": (with_array("means", np.zeros(6, np.float32)), "shape 6 instead of 6×3"),
    "wrong dtype": (with_array("means", np.zeros((2, 3), np.float64)), "float64"),
    "numpy file format": (bad_stype, "numpy.ndarray"),
    "truncated": (short_data, "4 bytes do not fill"),
    "negative shape": (negative_shape, "-2 prototypes, not from 1 to 10"),
    "absurd shape": (huge_shape, "1000000000 prototypes, not from 1 to 10"),
    "NaN": (with_array("means", np.full((2, 3), np.nan, np.float32)), "NaN or infinity"),
    "infinity": (with_array("means", np.full((2, 3), np.inf, np.float32)), "NaN or infinity"),
    "huge norm": (with_array("means", np.full((2, 3), 1e6, np.float32)), "max-prototype-norm"),
    "label too large": (with_array("labels", np.array([0, 10])), "label outside 0..9"),
    "negative label": (with_array("labels", np.array([-1, 3])), "label outside 0..9"),
    "duplicate label": (with_array("labels", np.array([3, 3])), "same label"),
    "float labels": (with_array("labels", np.array([0.0, 1.0], np.float32)), "float32"),
    "labels of another length": (with_array("labels", np.array([1, 2, 3])), "shape 3 instead of 2"),
    "zero count": (with_array("counts", np.array([0, 3])), "count below 1"),
    "no rows": (with_array("means", np.zeros((0, 3), np.float32)), "0 prototypes, not from 1 to 10"),
    "undeclared array": (extra_array, "secret"),
    "undeclared weights": (smuggled_weights, "undeclared array record 'weights'"),
    "missing prototypes": (no_prototypes, "no prototypes"),
}


@pytest.mark.parametrize("kind", BAD_PAYLOADS)
def test_a_bad_payload_is_refused_with_its_reason(kind: str) -> None:
    change, said = BAD_PAYLOADS[kind]
    content = honest()
    change(content)
    with pytest.raises(RefusedMessage) as caught:
        unpack_payload(content, UP, LIMITS, required=True)
    assert said in str(caught.value)


def test_more_prototypes_than_classes_are_refused() -> None:
    content = honest()
    with_array("means", np.zeros((11, 3), np.float32))(content)
    with_array("labels", np.arange(11))(content)
    with_array("counts", np.ones(11, np.int64))(content)
    with pytest.raises(RefusedMessage, match="11 prototypes, not from 1 to 10"):
        unpack_payload(content, UP, LIMITS, required=True)


def test_several_prototypes_of_a_class_are_limited_where_they_are_allowed() -> None:
    crossing = Crossing(prototypes=True, many_per_class=True)
    content = pack_payload(Payload(Prototypes(torch.ones(4, 3), torch.tensor([2, 2, 2, 5]))), crossing)
    limits = Limits(10, 3, max_per_class=3)
    got = unpack_payload(content, crossing, limits, required=True)
    assert got.prototypes is not None
    assert got.prototypes.labels.tolist() == [2, 2, 2, 5]
    with pytest.raises(RefusedMessage, match="3 prototypes with the same label"):
        unpack_payload(content, crossing, Limits(10, 3, max_per_class=2), required=True)


@pytest.mark.parametrize(
    ("array", "values", "said"),
    [
        ("owners", np.array([0, 0, 2]), "not numbered 0, 1, 2"),
        ("owners", np.array([1, 1, 2]), "not numbered 0, 1, 2"),
        ("owners", np.array([0, 1, 0]), "not numbered 0, 1, 2"),
        ("owners", np.array([0, 1]), "shape 2 instead of 3"),
        ("labels", np.array([3, 3, 1]), "same label"),
        ("labels", np.array([3, 10, 1]), "label outside"),
        ("means", np.full((3, 3), np.nan, np.float32), "NaN"),
        ("counts", np.array([1, 1, 1]), "local sets with the arrays"),
    ],
)
def test_bad_local_sets_are_refused(array: str, values: np.ndarray, said: str) -> None:
    crossing = Crossing(local_sets=True)
    sets = (Prototypes(torch.ones(2, 3), torch.tensor([0, 1])), Prototypes(torch.ones(1, 3), torch.tensor([0])))
    content = pack_payload(Payload(local_sets=sets), crossing)
    content.array_records["local-sets"][array] = raw(values)
    with pytest.raises(RefusedMessage) as caught:
        unpack_payload(content, crossing, LIMITS, required=True)
    assert said in str(caught.value)


def test_counts_are_refused_where_the_paper_promises_none() -> None:
    with pytest.raises(RefusedMessage, match="counts"):
        unpack_payload(honest(), Crossing(prototypes=True), LIMITS, required=True)


def test_weights_that_do_not_fit_the_model_are_refused() -> None:
    crossing = Crossing(weights=True)
    limits = Limits(10, 3, weights={"w": ("float32", (2, 2))})
    for name, shape, said in (("v", (2, 2), "do not fit the model: v, w"), ("w", (2, 3), "shape 2×3 instead of 2×2")):
        content = pack_payload(Payload(weights={name: torch.zeros(shape)}), crossing)
        with pytest.raises(RefusedMessage) as caught:
            unpack_payload(content, crossing, limits, required=True)
        assert said in str(caught.value)


def test_a_report_survives_a_round_trip() -> None:
    assert unpack_report(RecordDict({"report": pack_report(REPORT, LOSSES)}), 2, LOSSES) == REPORT


def test_a_report_with_an_undeclared_name_cannot_be_packed() -> None:
    for report in (
        Report(2, 3, 3, {"body": 1}),
        Report(2, 3, 3, {}, {"secret": 1.0}),
        Report(2, 3, 3, {}, {}, {"x": 1.0}),
    ):
        with pytest.raises(ValueError, match="is not declared; choose from "):
            pack_report(report, LOSSES)


def changed(**entries: float | int | list[int]) -> RecordDict:
    record = pack_report(REPORT, LOSSES)
    for name, value in entries.items():
        record[name.replace("__", ".")] = value
    return RecordDict({"report": record})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (RecordDict(), "records other than a report"),
        (RecordDict({"report": pack_report(REPORT, LOSSES), "more": MetricRecord({"x": 1})}), "records other"),
        (RecordDict({"report": pack_report(REPORT, LOSSES), "more": ConfigRecord({"x": "weights"})}), "records other"),
        (RecordDict({"report": MetricRecord({"round": 2})}), "incomplete"),
        (changed(losses__total=math.nan), "losses.total is not a finite number"),
        (changed(seconds__train=math.inf), "seconds.train is not a finite number"),
        (changed(round=1), "a reply to round 1 in round 2"),
        (changed(correct__head=21), "more correct predictions than test samples"),
        (changed(train_samples=-3), "odd entry train_samples"),
        (changed(class_counts=[1, 2]), "class_counts"),
        (changed(secret=3), "odd entry secret"),
        (changed(**{f"losses__{i}": 1.0 for i in range(99)}), "numbers"),
    ],
)
def test_a_bad_report_is_refused_with_its_reason(content: RecordDict, said: str) -> None:
    with pytest.raises(RefusedMessage) as caught:
        unpack_report(content, 2, LOSSES)
    assert said in str(caught.value)


def test_instructions_and_site_cards_survive_a_round_trip() -> None:
    instructions = Instructions(3, "run", evaluate=True, lineage=Lineage(13, ((11, 5), (12, 6))))
    assert unpack_instructions(RecordDict({"round": pack_instructions(instructions)})) == instructions
    card = SiteCard("site-1", 1, 4, "", "cnn4", (3, 28, 28), 1234, 30, 60, ("zero", "one"), (1,), "cpu")
    assert unpack_site_card(RecordDict({"site": pack_site_card(card)})) == card


@pytest.mark.parametrize("shape", [[], [0], [3, -1], [1] * 9, [2**13, 2**13], ["3"], [3.0]])
def test_an_introduction_with_an_impossible_input_shape_is_refused(shape: list[int]) -> None:
    card = SiteCard("site-1", 1, 4, "", "cnn4", (3, 28, 28), 1234, 30, 60, ("zero", "one"), (1,), "cpu")
    record = ConfigRecord({**pack_site_card(card), "input_shape": shape})
    with pytest.raises(RefusedMessage, match="input_shape"):
        unpack_site_card(RecordDict({"site": record}))


def test_malformed_instructions_are_refused() -> None:
    with pytest.raises(RefusedMessage, match="no complete record 'round'"):
        unpack_instructions(RecordDict())
    right = {"round": 3, "run_name": "run", "evaluate": True, "lineage": "11:5,13"}
    for key, value in (("round", "3"), ("lineage", 13), ("lineage", "11:5:2,13"), ("lineage", "")):
        wrong = ConfigRecord({**right, key: value})
        with pytest.raises(RefusedMessage, match=rf"round\.{key} is {value!r}"):
            unpack_instructions(RecordDict({"round": wrong}))
