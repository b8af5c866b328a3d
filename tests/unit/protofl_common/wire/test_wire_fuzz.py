"""Rubbish on the wire: decoders refuse it with `RefusedMessage` alone.

And accept only what keeps the rules.
"""

import math
import string

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from hypothesis import event, given
from hypothesis import strategies as st

from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.wire.payloads import check_size, template_of, unpack_payload
from protofl_common.wire.records import (
    SiteCard,
    pack_site_card,
    unpack_instructions,
    unpack_report,
    unpack_site_card,
)
from protofl_common.wire.schema import Limits, RefusedMessage
from server_app.run.replies import check_claims
from tests.support.attacks import raw
from tests.support.declared import DECLARED, INFERENCES, SITE, report_names
from tests.support.rubbish import DIM, NUMBERS, TEXTS, VALUES, arrays, floats

CLASSES = 6
ROUND = 5
MAX_NORM = 100.0
MAX_PER_CLASS = 3
HELD_CLASSES = (0, 1, 2, 4)
"""The classes that the site has said it has (`CARD`)."""
SAMPLES = 40


def modules():
    """Return the name "weights", and that of every other record of weights that is declared."""
    names = {"weights": None}
    for declared in DECLARED.values():
        names |= dict.fromkeys(declared.beside)
    names.pop("moments", None)
    return list(names)


MODULES = modules()
MODEL = {"body.weight": ("float32", (2, DIM)), "body.seen": ("int64", ())}
MOMENTS = template_of(ClassMoments(CLASSES, DIM).state_dict())
TEMPLATES = {**dict.fromkeys(MODULES, MODEL), "moments": MOMENTS}
LIMITS = Limits(CLASSES, DIM, MAX_NORM, TEMPLATES, MAX_PER_CLASS)
CARD = SiteCard(
    name="north",
    partition=0,
    num_partitions=3,
    domain="",
    arch="cnn4",
    input_shape=(1, 8, 8),
    parameters=99,
    train_samples=SAMPLES,
    test_samples=SAMPLES,
    classes=tuple("abcdef"),
    present=HELD_CLASSES,
    weights="",
    device="cpu",
    found=0,
    validation_samples=SAMPLES,
)


# -- what arrives ---------------------------------------------------------------------------------
@st.composite
def replies(draw, algo, training):
    """Draw a reply as an honest client might send it, then changed in none to three places."""
    content = RecordDict()
    if training:
        add_declared_records(draw, DECLARED[algo], content)

    report = {"round": ROUND, "train_samples": SAMPLES, "test_samples": SAMPLES}
    report["validation_samples"] = draw(st.sampled_from([0, SAMPLES]))
    names = sorted(report_names(algo, training) - report.keys())
    for name in draw(st.lists(st.sampled_from(names), max_size=4)):
        report[name] = draw(st.integers(0, SAMPLES))
    content["report"] = MetricRecord(report)

    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        change(draw, content)
    return content


def add_declared_records(draw, declared, content):
    """Add the records that an algorithm's clients send in training."""
    if declared.prototypes:
        content[declared.record] = some_prototypes(draw, declared)

    for record in MODULES:
        if record in declared.records:
            content[record] = some_weights(draw, may_be_factors=bool(declared.since))

    if "moments" in declared.records:
        moments = ClassMoments(CLASSES, DIM)
        features = torch.from_numpy(floats(draw, (SAMPLES, DIM))).nan_to_num(0, 0, 0)
        moments.measure(features, torch.tensor(HELD_CLASSES).repeat(SAMPLES // len(HELD_CLASSES)))
        content["moments"] = raw_record(
            {name: value.numpy() for name, value in moments.state_dict().items()}
        )

    if declared.label_counts:
        counts = np.zeros(CLASSES, np.int64)
        for label in HELD_CLASSES:
            counts[label] = draw(st.integers(0, 12))
        content["label_counts"] = raw_record({"counts": counts})


def some_prototypes(draw, declared):
    """Return prototypes of classes that the client has, as this algorithm sends them."""
    pool = [*HELD_CLASSES, *HELD_CLASSES] if declared.several else list(HELD_CLASSES)
    number = draw(st.integers(1, len(pool)))
    labels = np.array(draw(st.permutations(pool))[:number], np.int64)
    if declared.probabilities:
        means = np.abs(floats(draw, (number, CLASSES)))
        means /= means.sum(axis=1, keepdims=True)
    else:
        means = floats(draw, (number, DIM))

    arrays = {"means": means, "labels": labels}
    if "counts" in declared.prototypes:
        arrays["counts"] = np.array([draw(st.integers(1, 10)) for _ in labels], np.int64)
    return raw_record(arrays)


def some_weights(draw, may_be_factors):
    """Return the weights of MODEL; ``body.weight`` may be the product of two factors."""
    arrays = {"body.seen": np.array(4, np.int64)}
    if may_be_factors and draw(st.booleans()):
        arrays["body.weight:left"] = floats(draw, (2, 1))
        arrays["body.weight:right"] = floats(draw, (1, DIM))
    else:
        arrays["body.weight"] = floats(draw, (2, DIM))
    return raw_record(arrays)


def raw_record(arrays):
    return ArrayRecord({name: raw(values) for name, values in arrays.items()})


def change_array(draw, content):
    for record in content.array_records.values():
        record[draw(st.sampled_from([*record, "counts", "features"]))] = draw(arrays())


def change_labels(draw, content):
    """Replace all labels and counts by other whole numbers of eight bytes."""
    for record in content.array_records.values():
        for name in {"labels", "counts"} & set(record):
            length = len(record[name].data) // 8
            numbers = st.one_of(st.integers(-2, 60), st.integers(-(2**63), 2**63 - 1))
            values = draw(st.lists(numbers, min_size=length, max_size=length))
            record[name] = raw(np.array(values, np.int64))


def remove_array(draw, content):
    for record in content.array_records.values():
        if record:
            del record[draw(st.sampled_from(sorted(record)))]


def add_record(draw, content):
    """Put a record of any kind into ``content``, under a known or an unknown name."""
    known = ["prototypes", "outputs", "weights", "label_counts", "local_sets", "report", "site"]
    name = draw(st.one_of(st.sampled_from(known), TEXTS))
    kinds = [
        lambda: ArrayRecord({draw(TEXTS): draw(arrays())}),
        lambda: MetricRecord({draw(TEXTS): draw(st.one_of(st.integers(-9, 9), st.floats()))}),
        lambda: ConfigRecord({draw(TEXTS): draw(TEXTS)}),
    ]
    content[name] = draw(st.sampled_from(kinds))()


def remove_record(draw, content):
    if content:
        del content[draw(st.sampled_from(sorted(content)))]


def change_report(draw, content):
    """Write a number, or a list of numbers, over one value of each metric record."""
    known = ["round", "train_samples", "test_samples", "validation_samples", "correct.head"]
    known += ["losses.total", "losses.x", "seconds.train", "validation.head"]
    value = draw(st.one_of(NUMBERS, st.lists(st.integers(), max_size=3)))
    if isinstance(value, bool):  # Flower takes none
        return
    for record in content.metric_records.values():
        record[draw(st.one_of(st.sampled_from(known), TEXTS))] = value


CHANGES = (change_array, change_labels, remove_array, add_record, remove_record, change_report)


# -- what must hold of what is accepted -----------------------------------------------------------
def assert_proper(content, payload, report, algo, training):
    """Check that a reply that was accepted has what is declared, whole, finite and plausible."""
    declared = DECLARED[algo]

    assert set(content.array_records) == (declared.records if training else set())
    assert set(payload.entries) == set(content.array_records)
    assert list(content.metric_records) == ["report"]
    assert not content.config_records
    assert "local_sets" not in payload.entries

    entries = dict(content.metric_records["report"])

    assert set(entries) <= report_names(algo, training)
    assert all(type(value) in (int, float) and math.isfinite(value) for value in entries.values())
    assert_proper_report(report, training)

    prototypes = payload.entries.get(declared.record)

    assert (prototypes is not None) == bool(training and declared.prototypes)

    if prototypes is not None:
        record = content.array_records[declared.record]
        assert_proper_prototypes(prototypes, record, declared, report.train_samples)

    counts = payload.entries.get("label_counts")

    assert (counts is not None) == bool(training and declared.label_counts)

    if counts is not None:
        assert counts.dtype == torch.int64
        assert tuple(counts.shape) == (CLASSES,)
        assert counts.numpy().tobytes() == content.array_records["label_counts"]["counts"].data
        assert all(n >= 0 for n in counts.tolist())
        assert {label for label, n in enumerate(counts.tolist()) if n} <= set(HELD_CLASSES)
        assert 1 <= sum(counts.tolist()) <= report.train_samples

    for record in MODULES:
        weights = payload.entries.get(record)
        assert (weights is not None) == (training and record in declared.records)
        if weights is not None:
            assert_proper_weights(weights)


def assert_proper_report(report, training):
    """The report is of this round, and no count exceeds the samples."""
    assert report.round == ROUND
    assert (1 if training else 0) <= report.train_samples <= SAMPLES
    assert 0 <= report.test_samples <= SAMPLES
    assert 0 <= report.validation_samples <= SAMPLES
    assert set(report.validation) <= set(INFERENCES)
    assert report.validation_samples or not report.validation
    assert all(0 <= share <= 1 for share in report.validation.values())
    assert all(type(n) is int and 0 <= n <= report.test_samples for n in report.correct.values())


def assert_proper_prototypes(prototypes, record, declared, train_samples):
    """They are those of the message, of classes that the client has, and within the bounds."""
    assert set(record) == set(declared.prototypes)

    means = prototypes.means.numpy()
    labels = prototypes.labels.numpy()

    assert means.tobytes() == record["means"].data
    assert labels.tobytes() == record["labels"].data

    assert means.dtype == np.float32
    assert means.shape == (len(labels), CLASSES if declared.probabilities else DIM)
    assert np.isfinite(means).all()

    if declared.probabilities:
        assert means.min() >= 0
        np.testing.assert_allclose(means.astype(np.float64).sum(axis=1), 1, atol=2e-3)

    for row in means.tolist():
        assert math.sqrt(sum(x**2 for x in row)) <= MAX_NORM * (1 + 1e-12)

    assert labels.dtype == np.int64
    assert len(labels) >= 1
    assert set(labels.tolist()) <= set(HELD_CLASSES)
    assert np.bincount(labels).max() <= (MAX_PER_CLASS if declared.several else 1)

    assert (prototypes.counts is not None) == ("counts" in declared.prototypes)

    if prototypes.counts is not None:
        assert prototypes.counts.numpy().tobytes() == record["counts"].data
        assert min(prototypes.counts.tolist()) >= 1
        assert sum(prototypes.counts.tolist()) <= train_samples


def assert_proper_weights(weights):
    """They have the names, types and shapes of MODEL, and are finite."""
    assert set(weights) == set(MODEL)
    for name, (dtype, shape) in MODEL.items():
        assert str(weights[name].dtype) == f"torch.{dtype}"
        assert tuple(weights[name].shape) == shape
        assert np.isfinite(weights[name].numpy()).all()


def assert_refused_with_a_reason_fit_for_a_log(refusal):
    event("refused")

    assert 0 < len(str(refusal)) < 600
    assert str(refusal).isprintable()


def assert_taken_or_refused(content, algo, training):
    """Decode a reply in the server's order: it is proper, or refused with a reason."""
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
def test_replies_are_proper_or_refused(data, algo, training):
    assert_taken_or_refused(data.draw(replies(algo, training)), algo, training)


def with_bytes(text, changes):
    """Return ``text`` with some bytes replaced.

    A change is the place, as a part of the length from 0 to 1, and the new byte.
    """
    changed = bytearray(text)
    for place, value in changes:
        changed[int(place * len(changed))] = value
    return bytes(changed)


@given(st.data(), ALGOS)
def test_replies_with_wrong_bytes(data, algo):
    """Some bytes of a reply are changed in transit; we decode what Flower can still read."""
    content = data.draw(replies(algo, True))
    places = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))
    changes = data.draw(st.lists(places, min_size=1, max_size=4))

    filled = []
    for record in content.array_records.values():
        filled += [array for array in record.values() if array.data]
    in_an_array = filled and data.draw(st.booleans())
    if in_an_array:
        array = data.draw(st.sampled_from(filled))
        array.data = with_bytes(array.data, changes)

    try:
        text = recorddict_to_proto(content).SerializeToString(deterministic=True)
        if not in_an_array:
            text = with_bytes(text, changes)
        read = recorddict_from_proto(ProtoRecordDict.FromString(text))
    except Exception:  # Flower's own refusal
        event("not for Flower")
        return

    assert_taken_or_refused(read, algo, True)


PLAUSIBLE = {
    int: st.integers(-1, 99),
    bool: st.booleans(),
    str: st.text("abc-1/", max_size=4),
    list: st.lists(st.integers(0, 6), max_size=4, unique=True).map(sorted),
}


@given(st.data())
def test_introductions_are_proper_or_refused(data):
    """A card has up to two values changed, plausible or rubbish; one card in six gets a key more.

    One in six lacks a key, and one in six has a record beside it.
    """
    values = dict(pack_site_card(CARD))
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

    assert set(content) - {"audit"} == {"site"}  # a site may send the end of its log as well
    assert len(card.signature) in (0, 128)  # none, or 64 bytes in hexadecimal
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


INSTRUCTIONS = {
    "round": 3,
    "run_name": "r",
    "run_history": "11:5,13",
    "counted": 2,
    "part": 1.0,
}


@given(st.data())
def test_what_a_server_sends_is_proper_or_refused(data):
    """It sends instructions, and the prototype sets of every client (FedPCL)."""
    instructions = dict(INSTRUCTIONS)
    if data.draw(st.integers(0, 2)) == 0:
        instructions[data.draw(st.sampled_from(sorted(instructions)))] = data.draw(VALUES)

    rows = data.draw(st.integers(1, 3))

    def numbers(largest):
        values = data.draw(st.lists(st.integers(0, largest), min_size=rows, max_size=rows))
        return np.array(values, np.int64)

    sets = {
        "means": raw(floats(data.draw, (rows, DIM))),
        "labels": raw(numbers(CLASSES)),
        "owners": raw(np.sort(numbers(3))),
    }
    if data.draw(st.integers(0, 3)) == 0:
        sets[data.draw(st.sampled_from(sorted(sets)))] = data.draw(arrays())

    content = RecordDict({"round": ConfigRecord(instructions), "local_sets": ArrayRecord(sets)})
    try:
        unpack_instructions(content)
        payload = unpack_payload(content, CATALOG["fedpcl"].exchange.down, LIMITS, required=False)
    except RefusedMessage:
        event("refused")
        return
    event("accepted")

    for prototypes in payload.sets("local_sets"):
        labels = prototypes.labels.tolist()

        assert len(set(labels)) == len(prototypes) <= CLASSES
        assert 0 <= min(labels) <= max(labels) < CLASSES
        assert np.isfinite(prototypes.means.numpy()).all()
        assert prototypes.means.shape[1] == DIM

    assert sum(len(prototypes) for prototypes in payload.sets("local_sets")) == rows


@given(TEXTS, st.one_of(TEXTS, st.text("0123456789,:- _", max_size=9)))
def test_where_a_server_sends_a_client(run_name, run_history):
    """Instructions that are not refused have a run name fit for a folder, and a whole history.

    A client writes its state into the folder of that name; the history says which files count.
    """
    names = {"run_name": run_name, "run_history": run_history}
    try:
        unpack_instructions(RecordDict({"round": ConfigRecord({**INSTRUCTIONS, **names})}))
    except RefusedMessage as refusal:
        assert_refused_with_a_reason_fit_for_a_log(refusal)
        return

    assert 1 <= len(run_name) <= 200
    assert run_name.isprintable()
    assert run_name[0] != "."
    assert not {"/", "\\"} & set(run_name)
    assert set(run_history) <= set("0123456789:,")
    assert all(part.isdigit() for pair in run_history.split(",") for part in pair.split(":"))
