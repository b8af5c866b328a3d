"""Rubbish on the wire: decoders refuse it with `RefusedMessage` alone, and accept only what keeps the rules."""

import math
import string
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from hypothesis import event, given
from hypothesis import strategies as st

from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.wire.payloads import Payload, check_size, template_of, unpack_payload
from protofl_common.wire.records import (
    Report,
    SiteCard,
    unpack_instructions,
    unpack_report,
    unpack_site_card,
)
from protofl_common.wire.schema import Limits, RefusedMessage
from server_app.replies import check_claims
from tests.support.attacks import raw
from tests.support.declared import DECLARED, INFERENCES, SITE, report_names
from tests.support.rubbish import DIM, NUMBERS, TEXTS, VALUES, arrays, floats

CLASSES, ROUND, MAX_NORM, MANY = 6, 5, 100.0, 3
HOLDS, SAMPLES = (0, 1, 2, 4), 40
MODEL = {"body.weight": ("float32", (2, DIM)), "body.seen": ("int64", ())}
MODULES = (
    "weights",
    *dict.fromkeys(name for one in DECLARED.values() for name in one.beside if name != "moments"),
)
TEMPLATES = dict.fromkeys(MODULES, MODEL) | {
    "moments": template_of(ClassMoments(CLASSES, DIM, "lda").state_dict())
}
LIMITS = Limits(CLASSES, DIM, MAX_NORM, TEMPLATES, MANY)
CARD = SiteCard(
    "north",
    0,
    3,
    "",
    "cnn4",
    (1, 8, 8),
    99,
    SAMPLES,
    SAMPLES,
    (*"abcdef",),
    HOLDS,
    "",
    "cpu",
    0,
    SAMPLES,
)


# -- what arrives ------------------------------------------------------------------------------------------------------
@st.composite
def replies(draw: st.DrawFn, algo: str, training: bool) -> RecordDict:
    """A reply as an honest client might send it, then changed in none to three places."""
    declared, content = DECLARED[algo], RecordDict()
    if training and declared.prototypes:
        pool = [*HOLDS, *HOLDS] if declared.several else list(HOLDS)
        labels = np.array(draw(st.permutations(pool))[: draw(st.integers(1, len(pool)))], np.int64)
        means = floats(draw, (len(labels), CLASSES if declared.probabilities else DIM))
        if declared.probabilities:
            means = np.abs(means) / np.abs(means).sum(axis=1, keepdims=True)
        made = {"means": means, "labels": labels}
        if "counts" in declared.prototypes:
            made["counts"] = np.array([draw(st.integers(1, 10)) for _ in labels], np.int64)
        content[declared.record] = ArrayRecord({name: raw(values) for name, values in made.items()})
    for record in (name for name in MODULES if training and name in declared.records):
        matrix = {"body.weight": raw(floats(draw, (2, DIM)))}
        if declared.since and draw(st.booleans()):
            shapes = {":left": (2, 1), ":right": (1, DIM)}
            matrix = {
                f"body.weight{side}": raw(floats(draw, shape)) for side, shape in shapes.items()
            }
        content[record] = ArrayRecord({**matrix, "body.seen": raw(np.array(4, np.int64))})
    if training and "moments" in declared.records:
        moments, rows = (
            ClassMoments(CLASSES, DIM, "lda"),
            torch.from_numpy(floats(draw, (SAMPLES, DIM))),
        )
        moments.measure(rows.nan_to_num(0, 0, 0), torch.tensor(HOLDS).repeat(SAMPLES // len(HOLDS)))
        content["moments"] = ArrayRecord(
            {name: raw(value.numpy()) for name, value in moments.state_dict().items()}
        )
    if training and declared.label_counts:
        counts = [draw(st.integers(0, 12)) if label in HOLDS else 0 for label in range(CLASSES)]
        content["label_counts"] = ArrayRecord({"counts": raw(np.array(counts, np.int64))})
    report: dict[str, Any] = {"round": ROUND, "train_samples": SAMPLES, "test_samples": SAMPLES}
    report["validation_samples"] = draw(st.sampled_from([0, SAMPLES]))
    names = sorted(report_names(algo, training) - report.keys())
    report |= {
        name: draw(st.integers(0, SAMPLES))
        for name in draw(st.lists(st.sampled_from(names), max_size=4))
    }
    content["report"] = MetricRecord(report)
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        change(draw, content)
    return content


def change_array(draw: st.DrawFn, content: RecordDict) -> None:
    for record in content.array_records.values():
        record[draw(st.sampled_from([*record, "counts", "features"]))] = draw(arrays())


def change_labels(draw: st.DrawFn, content: RecordDict) -> None:
    for record in content.array_records.values():
        for name in {"labels", "counts"} & set(record):
            length = len(record[name].data) // 8
            numbers = st.one_of(st.integers(-2, 60), st.integers(-(2**63), 2**63 - 1))
            record[name] = raw(
                np.array(draw(st.lists(numbers, min_size=length, max_size=length)), np.int64)
            )


def remove_array(draw: st.DrawFn, content: RecordDict) -> None:
    for record in content.array_records.values():
        if record:
            del record[draw(st.sampled_from(sorted(record)))]


def add_record(draw: st.DrawFn, content: RecordDict) -> None:
    known = ["prototypes", "outputs", "weights", "label_counts", "local_sets", "report", "site"]
    name = draw(st.one_of(st.sampled_from(known), TEXTS))
    kinds: list[Callable[[], Any]] = [
        lambda: ArrayRecord({draw(TEXTS): draw(arrays())}),
        lambda: MetricRecord({draw(TEXTS): draw(st.one_of(st.integers(-9, 9), st.floats()))}),
        lambda: ConfigRecord({draw(TEXTS): draw(TEXTS)}),
    ]
    content[name] = draw(st.sampled_from(kinds))()


def remove_record(draw: st.DrawFn, content: RecordDict) -> None:
    if content:
        del content[draw(st.sampled_from(sorted(content)))]


def change_report(draw: st.DrawFn, content: RecordDict) -> None:
    known = [
        "round",
        "train_samples",
        "test_samples",
        "correct.head",
        "losses.total",
        "seconds.train",
        "losses.x",
    ]
    known += ["validation_samples", "validation.head"]
    value = draw(st.one_of(NUMBERS, st.lists(st.integers(), max_size=3)))
    for record in content.metric_records.values():
        if not isinstance(value, bool):  # Flower takes none
            record[draw(st.one_of(st.sampled_from(known), TEXTS))] = value


CHANGES = (change_array, change_labels, remove_array, add_record, remove_record, change_report)


# -- what must hold of what is accepted --------------------------------------------------------------------------------
def assert_proper(
    content: RecordDict, payload: Payload, report: Report, algo: str, training: bool
) -> None:
    declared = DECLARED[algo]
    assert set(content.array_records) == (declared.records if training else set())
    assert set(payload.entries) == set(content.array_records)
    prototypes = payload.entries.get(declared.record)
    assert list(content.metric_records) == ["report"]
    assert not content.config_records
    flat = dict(content.metric_records["report"])
    assert set(flat) <= report_names(algo, training)
    assert all(type(value) in (int, float) and math.isfinite(value) for value in flat.values())
    assert report.round == ROUND
    assert (1 if training else 0) <= report.train_samples <= SAMPLES
    assert 0 <= report.test_samples <= SAMPLES
    assert 0 <= report.validation_samples <= SAMPLES
    assert set(report.validation) <= set(INFERENCES)
    assert report.validation_samples or not report.validation
    assert all(0 <= share <= 1 for share in report.validation.values())
    assert all(type(n) is int and 0 <= n <= report.test_samples for n in report.correct.values())
    assert "local_sets" not in payload.entries
    assert (prototypes is not None) == bool(training and declared.prototypes)
    counts = payload.entries.get("label_counts")
    assert (counts is not None) == bool(training and declared.label_counts)
    if counts is not None:
        assert (counts.dtype, tuple(counts.shape)) == (torch.int64, (CLASSES,))
        assert counts.numpy().tobytes() == content.array_records["label_counts"]["counts"].data
        assert all(n >= 0 for n in counts.tolist())
        assert {label for label, n in enumerate(counts.tolist()) if n} <= set(HOLDS)
        assert 1 <= sum(counts.tolist()) <= report.train_samples
    if prototypes is not None:
        record = content.array_records[declared.record]
        assert set(record) == set(declared.prototypes)
        means, labels = prototypes.means.numpy(), prototypes.labels.numpy()
        assert (means.dtype, labels.dtype) == (np.float32, np.int64)
        assert 1 <= len(labels) <= CLASSES * (MANY if declared.several else 1)
        assert means.shape == (len(labels), CLASSES if declared.probabilities else DIM)
        assert np.isfinite(means).all()
        if declared.probabilities:
            assert means.min() >= 0
            np.testing.assert_allclose(means.astype(np.float64).sum(axis=1), 1, atol=2e-3)
        assert max(math.sqrt(sum(float(x) ** 2 for x in row)) for row in means) <= MAX_NORM * (
            1 + 1e-12
        )
        assert set(labels.tolist()) <= set(HOLDS)
        assert max(labels.tolist().count(label) for label in labels.tolist()) <= (
            MANY if declared.several else 1
        )
        assert means.tobytes() == record["means"].data
        assert labels.tobytes() == record["labels"].data
        assert (prototypes.counts is not None) == ("counts" in declared.prototypes)
        if prototypes.counts is not None:
            assert prototypes.counts.numpy().tobytes() == record["counts"].data
            assert min(prototypes.counts.tolist()) >= 1
            assert sum(prototypes.counts.tolist()) <= report.train_samples
    for record in MODULES:
        weights = payload.entries.get(record)
        assert (weights is not None) == (training and record in declared.records)
        if weights is None:
            continue
        assert set(weights) == set(MODEL)
        for name, (dtype, shape) in MODEL.items():
            assert (str(weights[name].dtype), tuple(weights[name].shape)) == (
                f"torch.{dtype}",
                shape,
            )
            assert np.isfinite(weights[name].numpy()).all()


def assert_refused_with_a_reason_fit_for_a_log(refusal: RefusedMessage) -> None:
    event("refused")
    assert 0 < len(str(refusal)) < 600
    assert str(refusal).isprintable()


def assert_taken_or_refused(content: RecordDict, algo: str, training: bool) -> None:
    """As the server does it."""
    row = CATALOG[algo]
    declared = row.exchange.up if training else {}
    try:
        check_size(content, declared, LIMITS)
        report = unpack_report(content, ROUND, row.reported_losses if training else ())
        payload = unpack_payload(content, declared, LIMITS, required=True)
        check_claims(report, payload, CARD, training)
    except RefusedMessage as refusal:
        assert_refused_with_a_reason_fit_for_a_log(refusal)
        return
    event("accepted")
    assert_proper(content, payload, report, algo, training)


ALGOS = st.sampled_from(sorted(DECLARED))


@given(st.data(), ALGOS, st.booleans())
def test_replies(data: st.DataObject, algo: str, training: bool) -> None:
    assert_taken_or_refused(data.draw(replies(algo, training)), algo, training)


def with_bytes(text: bytes, changes: list[tuple[float, int]]) -> bytes:
    """``text`` with some bytes replaced: (where, as a part of its length; by what)."""
    changed = bytearray(text)
    for place, value in changes:
        changed[int(place * len(changed))] = value
    return bytes(changed)


@given(st.data(), ALGOS)
def test_replies_with_wrong_bytes(data: st.DataObject, algo: str) -> None:
    """Some bytes of an honest reply are changed in transit; what Flower can still read, we decode."""
    content = data.draw(replies(algo, True))
    places = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))
    changes = data.draw(st.lists(places, min_size=1, max_size=4))
    held = [
        array
        for record in content.array_records.values()
        for array in record.values()
        if array.data
    ]
    if held and data.draw(st.booleans()):
        array = data.draw(st.sampled_from(held))
        array.data, changes = with_bytes(array.data, changes), []
    try:
        text = with_bytes(
            recorddict_to_proto(content).SerializeToString(deterministic=True), changes
        )
        read = recorddict_from_proto(ProtoRecordDict.FromString(text))
    except Exception:  # Flower's own refusal
        event("not for Flower")
        return
    assert_taken_or_refused(read, algo, True)


PLAUSIBLE: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-1, 99),
    bool: st.booleans(),
    str: st.text("abc-1/", max_size=4),
    list: st.lists(st.integers(0, 6), max_size=4, unique=True).map(sorted),
}


@given(st.data())
def test_introductions(data: st.DataObject) -> None:
    honest = {"name": "north", "partition": 0, "num_partitions": 3, "domain": "", "arch": "cnn4"}
    honest |= {"input_shape": [1, 8, 8], "parameters": 9, "train_samples": 30, "test_samples": 30}
    values: dict[str, Any] = honest | {"device": "cpu", "classes": list("abcdef"), "present": [1, 4], "real": True,
        "weights": "0f" * 8, "signature": "", "columns": "", "found": 60, "validation_samples": 0}  # fmt: skip
    for key in data.draw(st.lists(st.sampled_from(sorted(SITE)), max_size=2)):
        values[key] = data.draw(PLAUSIBLE[SITE[key]] if data.draw(st.booleans()) else VALUES)
    if data.draw(st.integers(0, 5)) == 0:
        values[data.draw(TEXTS)] = data.draw(VALUES)
    if data.draw(st.integers(0, 5)) == 0:
        del values[data.draw(st.sampled_from(sorted(values)))]
    content = RecordDict({"site": ConfigRecord(values)})
    if data.draw(st.integers(0, 5)) == 0:
        add_record(data.draw, content)
    try:
        card = unpack_site_card(content)
    except RefusedMessage as refusal:
        assert_refused_with_a_reason_fit_for_a_log(refusal)
        return
    event("accepted")
    assert set(content) - {"audit"} == {"site"}
    assert len(card.signature) in (0, 128)
    assert set(values) == set(SITE)
    for key, kind in SITE.items():
        assert type(values[key]) is kind
    assert all(value >= 0 for value in values.values() if isinstance(value, int))
    names = [card.name, card.domain, card.arch, card.weights, card.columns, *card.classes]
    assert all(isinstance(name, str) and len(name) <= 200 for name in names)
    assert card.name.isascii()
    assert card.name[0].isalnum()
    assert set(card.name) <= {*string.ascii_letters, *string.digits, *"._-"}
    assert list(card.present) == sorted({int(label) for label in card.present})
    assert all(type(label) is int and 0 <= label < len(card.classes) for label in card.present)
    assert 1 <= len(card.input_shape) <= 8
    assert all(type(size) is int and size > 0 for size in card.input_shape)


@given(st.data())
def test_what_a_client_is_told(data: st.DataObject) -> None:
    """Instructions, and the sets of every client (FedPCL), which only the server sends."""
    values: dict[str, Any] = {
        "round": 3,
        "run_name": "r",
        "run_history": "11:5,13",
        "counted": 2,
        "part": 1.0,
    }
    rows = data.draw(st.integers(1, 3))

    def numbers(largest: int) -> np.ndarray:
        return np.array(
            data.draw(st.lists(st.integers(0, largest), min_size=rows, max_size=rows)), np.int64
        )

    means, labels, owners = floats(data.draw, (rows, DIM)), numbers(CLASSES), np.sort(numbers(3))
    made = {"means": raw(means), "labels": raw(labels), "owners": raw(owners)}
    if data.draw(st.integers(0, 2)) == 0:
        values[data.draw(st.sampled_from(sorted(values)))] = data.draw(VALUES)
    if data.draw(st.integers(0, 3)) == 0:
        made[data.draw(st.sampled_from(sorted(made)))] = data.draw(arrays())
    content = RecordDict({"round": ConfigRecord(values), "local_sets": ArrayRecord(made)})
    try:
        unpack_instructions(content)
        payload = unpack_payload(content, CATALOG["fedpcl"].exchange.down, LIMITS, required=False)
    except RefusedMessage:
        event("refused")
        return
    event("accepted")
    for one in payload.sets("local_sets"):
        assert len(set(one.labels.tolist())) == len(one) <= CLASSES
        assert 0 <= min(one.labels.tolist()) <= max(one.labels.tolist()) < CLASSES
        assert np.isfinite(one.means.numpy()).all()
        assert one.means.shape[1] == DIM
    assert sum(len(one) for one in payload.sets("local_sets")) == rows


@given(TEXTS, st.one_of(TEXTS, st.text("0123456789,:- _", max_size=9)))
def test_where_a_server_sends_a_client(run_name: str, run_history: str) -> None:
    """The run name becomes a folder, and the run_history says which files in it count."""
    values = {
        "round": 3,
        "run_name": run_name,
        "run_history": run_history,
        "counted": 0,
        "part": 1.0,
    }
    try:
        unpack_instructions(RecordDict({"round": ConfigRecord(values)}))
    except RefusedMessage as refusal:
        assert_refused_with_a_reason_fit_for_a_log(refusal)
        return
    assert 1 <= len(run_name) <= 200
    assert run_name.isprintable()
    assert run_name[0] != "."
    assert not {"/", "\\"} & set(run_name)
    assert set(run_history) <= set("0123456789:,")
    assert all(part.isdigit() for pair in run_history.split(",") for part in pair.split(":"))
