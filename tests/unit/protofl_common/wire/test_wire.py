"""The wire: everything declared survives a round trip, also in an envelope.

All else is refused with its reason.
"""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from client_app.answers import answered
from protofl_common.basics.run_history import RunHistory
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.build import build_model
from protofl_common.wire import records
from protofl_common.wire.envelope import MAX_ENVELOPE_BYTES, NAME, put_in, take_out
from protofl_common.wire.payloads import (
    RAW,
    Payload,
    check_size,
    declared_part,
    pack_payload,
    payload_bytes,
    template_of,
    unpack_payload,
)
from protofl_common.wire.schema import (
    Counts,
    Exchange,
    Limits,
    Moments,
    RefusedMessage,
    Update,
    Vectors,
    VectorSets,
    Weights,
)
from server_app.network.flower_compat import push_each
from tests.support.attacks import raw
from tests.support.declared import DECLARED

UP = {"prototypes": Vectors(counts=True)}
LIMITS = Limits(num_classes=10, feature_dim=3, max_norm=100.0)
LOSSES = CATALOG["fedproto"].reported_losses
CARD = records.SiteCard(
    "site-1", 1, 4, "", "cnn4", (3, 28, 28), 1234, 30, 60, ("zero", "one"), (1,), "0a1b", "cpu"
)
REPORT = records.Report(
    2, 30, 20, {"head": 11}, {"total": 0.5, "cross-entropy": 0.5}, {"train": 1.5}
)


def honest():
    """Return a reply of two prototypes and a report, as `UP` declares them."""
    means = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    prototypes = Prototypes(means, labels=torch.tensor([7, 2]), counts=torch.tensor([5, 9]))
    content = pack_payload(Payload(prototypes=prototypes), UP)
    content["report"] = records.pack_report(REPORT, LOSSES)
    return content


def some_value(entry):
    """Return a value that fits an entry's declaration, of 10 classes and 3 features."""
    match entry:
        case Vectors():
            counts = torch.tensor([5, 9]) if entry.counts else None
            labels = torch.tensor([9, 9]) if entry.several else torch.tensor([0, 9])
            means = torch.randn(2, {"features": 3, "classes": 10, "backbones": 4}[entry.width])
            if entry.probabilities:
                means = means.softmax(dim=1)
            return Prototypes(means, labels, counts)
        case VectorSets():
            return tuple(Prototypes(torch.randn(rows, 3), torch.arange(rows)) for rows in (2, 1, 3))
        case Moments():
            moments = ClassMoments(10, 4)
            moments.measure(torch.randn(30, 4), torch.arange(30) % 7)
            return moments.state_dict()
        case Weights():
            part = entry.parts[0]
            return {
                f"{part}head.weight": torch.randn(10, 3),
                f"{part}body.1.num_batches_tracked": torch.tensor(4),
            }
        case Counts():
            return torch.tensor([0, 5, 9, *[0] * 7])
    raise AssertionError(entry)


def some_payload(declared):
    return Payload(**{name: some_value(entry) for name, entry in declared.items()})


def assert_refused(content, declared, said, limits=LIMITS):
    with pytest.raises(RefusedMessage, match=said):
        unpack_payload(content, declared, limits, required=True)


def assert_too_large(content, declared, said, limits=LIMITS):
    with pytest.raises(RefusedMessage, match=said):
        check_size(content, declared, limits)


def assert_equal(got, sent):
    """Compare all entries, to the last bit."""
    assert got.entries.keys() == sent.entries.keys()
    for name in sent.entries:
        got_tensors = tensors_of(got, name)
        sent_tensors = tensors_of(sent, name)

        assert got_tensors.keys() == sent_tensors.keys()
        for key, tensor in sent_tensors.items():
            assert torch.equal(got_tensors[key], tensor)


def tensors_of(payload, name):
    """Return every tensor of an entry by a name that tells it from the others."""
    found = {**(payload.weights(name) or {}), "of classes": payload.counts(name)}
    for number, prototypes in enumerate((payload.vectors(name), *payload.sets(name))):
        for part in ("means", "labels", "counts"):
            found[f"{number} {part}"] = getattr(prototypes, part, None)
    return {key: tensor for key, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize("algo", CATALOG)
@pytest.mark.parametrize("way", ["down", "up"])
def test_every_declared_payload_survives_a_round_trip(algo, way):
    """Each algorithm's entries, up and down, are packed and unpacked to the last bit."""
    declared = getattr(CATALOG[algo].exchange, way)
    sent = some_payload(declared)

    assert sent.entries.keys() == declared.keys()

    templates = {name: template_of(sent.weights(name) or {}) for name in declared}
    limits = Limits(10, 3, 100.0, templates, frozen_dim=4)

    content = pack_payload(sent, declared)
    received = unpack_payload(content, declared, limits, required=True)

    assert_equal(received, sent)


@pytest.mark.parametrize("algo", CATALOG)
def test_nothing_undeclared_can_be_packed(algo):
    """Each entry that an algorithm does not declare is refused when it is packed.

    So are two prototypes of a class where one is declared; counts that are not declared are left
    out.
    """
    kinds = {
        "weights": Weights(),
        "prototypes": UP["prototypes"],
        "local_sets": VectorSets(),
        "label_counts": Counts(),
        "secret": Weights(),
    }
    everything = some_payload(kinds).entries
    two_of_a_class = Prototypes(torch.randn(2, 3), torch.tensor([4, 4]))

    for declared in (CATALOG[algo].exchange.down, CATALOG[algo].exchange.up):
        for name in everything.keys() - declared.keys():
            with pytest.raises(ValueError, match=f"{name} is not declared"):
                pack_payload(Payload(**{name: everything[name]}), declared)

        one_a_class = Vectors(several=False)
        vectors = declared.get("prototypes", one_a_class)
        if not vectors.several:
            with pytest.raises(ValueError, match="not declared"):
                pack_payload(Payload(prototypes=two_of_a_class), declared)
        if "prototypes" in declared and not vectors.counts:
            packed = pack_payload(Payload(prototypes=everything["prototypes"]), declared)
            assert set(packed.array_records["prototypes"]) == {"means", "labels"}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param([0.77, 0.33] + [0.0] * 8, id="sum is not 1"),
        pytest.param([-0.6, 0.5] + [0.1375] * 8, id="a number below 0"),
        pytest.param([0.0] * 10, id="sum is 0"),
    ],
)
def test_class_probabilities_that_are_none_are_refused(wrong):
    declared = {"outputs": Vectors(width="classes", probabilities=True)}
    outputs = Prototypes(torch.tensor([wrong, [0.1] * 10]), torch.tensor([3, 4]))
    content = pack_payload(Payload(outputs=outputs), declared)

    assert_refused(content, declared, "outputs that are not class probabilities")


BAD_ARRAYS = {
    "wrong rank": ("means", raw(np.zeros(6, np.float32)), "shape 6 instead of 6×3"),
    "numpy file format": ("means", Array(np.zeros((2, 3), np.float32)), "numpy.ndarray"),
    "truncated": ("means", Array("float32", (2, 3), RAW, b"1234"), "4 bytes do not fill"),
    "negative shape": (
        "means",
        Array("float32", (-2, 3), RAW, b""),
        "prototypes: -2 rows, not from 1 to 10",
    ),
    "no rows": ("means", raw(np.zeros((0, 3), np.float32)), "prototypes: 0 rows, not from 1 to 10"),
    "float labels": ("labels", raw(np.array([0.0, 1.0], np.float32)), "float32"),
    "labels of another length": ("labels", raw(np.array([1, 2, 3])), "shape 3 instead of 2"),
    "undeclared array": ("secret", raw(np.zeros(3, np.float32)), "secret"),
}
"""What `tests/federation/test_hostile.py` does not send."""


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_a_bad_array_is_refused_with_its_reason(kind):
    name, array, said = BAD_ARRAYS[kind]
    content = honest()
    content.array_records["prototypes"][name] = array

    assert_refused(content, UP, re.escape(said))


def test_a_declared_entry_must_be_there():
    content = honest()
    del content["prototypes"]

    assert_refused(content, UP, "no prototypes")


def test_several_prototypes_of_a_class_are_limited():
    """Class 2 has three prototypes; at most three, or two, are allowed."""
    declared = {"prototypes": Vectors(several=True)}
    prototypes = Prototypes(torch.ones(4, 3), torch.tensor([2, 2, 2, 5]))
    content = pack_payload(Payload(prototypes=prototypes), declared)

    three = Limits(10, 3, max_per_class=3)
    received = unpack_payload(content, declared, three, required=True).vectors()

    assert received.labels.tolist() == [2, 2, 2, 5]

    two = Limits(10, 3, max_per_class=2)

    assert_refused(content, declared, "same label, not at most 2 .max-prototypes-per-c", two)

    said = r"80 bytes of arrays, .* at most 40 \(max-prototypes-per-class\)"

    assert_too_large(content, declared, said, Limits(2, 3, max_per_class=1))


def test_the_number_of_sets_is_limited(monkeypatch):
    """FedPCL makes a table of all classes of each set, however few of them the set has.

    So many tiny sets would fill a client's memory.
    """
    monkeypatch.setattr("protofl_common.wire.payloads.MAX_SETS", 1)
    declared = {"sets": VectorSets()}
    one = Prototypes(torch.ones(1, 3), torch.tensor([0]))

    assert_refused(pack_payload(Payload(sets=(one, one)), declared), declared, "in order, to 0")


@pytest.mark.parametrize(("array", "values", "said"), [
    ("owners", np.array([0, 0, 2]), "not numbered 0, 1, 2"),
    ("owners", np.array([1, 1, 2]), "not numbered 0, 1, 2"),
    ("owners", np.array([0, 1, 0]), "not numbered 0, 1, 2"),
    ("owners", np.array([0, 1]), "shape 2 instead of 3"),
    ("labels", np.array([3, 3, 1]), "same label"),
    ("labels", np.array([3, 10, 1]), "label outside"),
])  # fmt: skip
def test_bad_local_sets_are_refused(array, values, said):
    """Two clients' sets hold classes 0 and 1, and class 0; one array is replaced."""
    declared = {"local_sets": VectorSets()}
    sets = (
        Prototypes(torch.ones(2, 3), torch.tensor([0, 1])),
        Prototypes(torch.ones(1, 3), torch.tensor([0])),
    )
    content = pack_payload(Payload(local_sets=sets), declared)
    content.array_records["local_sets"][array] = raw(values)

    assert_refused(content, declared, re.escape(said))


BODY = {"weights": Weights(parts=("body.",))}
BODY_LIMITS = Limits(10, 3, weights={"weights": {"body.w": ("float32", (2, 2))}})


def test_a_declared_part_of_the_weights_survives_and_the_rest_is_refused_both_ways():
    """Declared are the weights whose names begin with "body."; others are refused by all checks."""
    body = {"body.w": torch.randn(2, 2)}
    content = pack_payload(Payload(weights=body), BODY)

    assert_equal(unpack_payload(content, BODY, BODY_LIMITS, required=True), Payload(weights=body))

    for undeclared in ("head.w", "bod", "body", "xbody.w"):
        weights = {**body, undeclared: torch.zeros(1)}
        said = rf"weights\.{undeclared} is not declared .*; parts: body\."

        with pytest.raises(ValueError, match=said):
            pack_payload(Payload(weights=weights), BODY)

        content = pack_payload(Payload(weights=weights), {"weights": Weights()})
        said = f"weights whose arrays do not fit: {undeclared}"

        assert_refused(content, BODY, said, BODY_LIMITS)

        said = "bytes of arrays, where a valid reply has at most 16"

        assert_too_large(content, BODY, said, BODY_LIMITS)

    nothing = pack_payload(Payload(weights={}), BODY)

    assert_refused(nothing, BODY, r"arrays do not fit: body\.w", BODY_LIMITS)


def test_the_declared_part_of_a_module():
    """Body and head of a model are apart, and together all of it."""
    model = build_model("cnn4", input_shape=(1, 8, 8), num_classes=4, feature_dim=6, seed=1)
    whole = model.state_dict()
    body = declared_part(model, Weights(parts=("body.",)))
    head = declared_part(model, Weights(parts=("head.",)))

    assert body.keys() | head.keys() == whole.keys() == declared_part(model, Weights()).keys()
    assert all(name.startswith("body.") for name in body)
    assert all(name.startswith("head.") for name in head)
    assert declared_part(model, Weights(parts=("body.", "head."))).keys() == whole.keys()


def test_entries_of_one_kind_under_several_names():
    """Each is checked by its own declaration, and against its own arrays."""
    declared = {
        "weights": Weights(parts=("body.",)),
        "critic": Weights(of="critic"),
        "prototypes": Vectors(counts=True),
        "logits": Vectors(width="classes"),
    }
    templates = {"weights": {"body.w": ("float32", (2,))}, "critic": {"w": ("float32", (3,))}}
    sent = Payload(
        weights={"body.w": torch.randn(2)},
        critic={"w": torch.randn(3)},
        prototypes=Prototypes(torch.randn(1, 3), torch.tensor([4]), torch.tensor([2])),
        logits=Prototypes(torch.randn(2, 10), torch.tensor([4, 1])),
    )
    limits = Limits(10, 3, weights=templates)

    content = pack_payload(sent, declared)

    assert list(content) == list(declared)

    check_size(content, declared, limits)

    assert_equal(unpack_payload(content, declared, limits, required=True), sent)

    content["critic"], content["weights"] = content["weights"], content["critic"]

    assert_refused(content, declared, r"weights whose arrays do not fit: body\.w, w", limits)

    del content["critic"], content["weights"]

    assert_refused(content, declared, "no weights", limits)

    received = unpack_payload(content, declared, limits, required=False)

    assert received.entries.keys() == {"prototypes", "logits"}


COUNTS = {"label_counts": Counts()}


@pytest.mark.parametrize("numbers", [[3] * 9 + [-1], [0] * 10])
def test_bad_counts_are_refused(numbers):
    record = ArrayRecord({"counts": raw(np.array(numbers, np.int64))})
    said = "a number of samples is below 0, or all are 0"

    assert_refused(RecordDict({"label_counts": record}), COUNTS, said)


def test_a_number_costs_four_bytes_and_a_label_or_a_count_eight():
    """Names and the report cost nothing; what is too large by one number is refused."""
    of_means = 2 * 3 * 4
    of_labels = of_counts = 2 * 8
    assert payload_bytes(honest()) == of_means + of_labels + of_counts

    content = pack_payload(some_payload(COUNTS), COUNTS)

    assert payload_bytes(content) == 80

    check_size(content, COUNTS, LIMITS)

    content.array_records["label_counts"]["means"] = raw(np.zeros(1, np.int64))
    said = "88 bytes of arrays, where a valid reply has at most 80"

    assert_too_large(content, COUNTS, said)
    assert_refused(content, COUNTS, "label_counts whose arrays do not fit: means")


@pytest.mark.parametrize(("entry", "one"), [
    (Weights(parts=("body.conv1.",)), True),
    (Weights(parts=("head.", "body.")), True),
    (Counts(), False),
])  # fmt: skip
def test_what_is_shared_says_whether_clients_must_be_of_one_architecture(entry, one):
    assert Exchange(up={"it": entry}).needs_one_architecture == one
    assert Exchange(down={"other": VectorSets(), "it": entry}).needs_one_architecture == one


def test_the_algorithms_that_need_one_architecture():
    averaging = {algo for algo, row in CATALOG.items() if row.exchange.needs_one_architecture}

    assert averaging == {algo for algo, declared in DECLARED.items() if declared.averages_models}
    assert not Exchange().needs_one_architecture
    with pytest.raises(ValueError, match="up: sets: only a server can send"):
        Exchange({}, {"sets": VectorSets()})


def test_a_report_with_an_undeclared_name_cannot_be_packed():
    for groups in (({"body": 1},), ({}, {"secret": 1.0}), ({}, {}, {"x": 1.0})):
        with pytest.raises(ValueError, match="is not declared; choose from "):
            records.pack_report(records.Report(2, 3, 3, *groups), LOSSES)


def changed(**entries):
    """Return a report with these entries replaced or added; ``a__b`` stands for ``a.b``."""
    record = records.pack_report(REPORT, LOSSES)
    for name, value in entries.items():
        record[name.replace("__", ".")] = value
    return RecordDict({"report": record})


@pytest.mark.parametrize(("content", "said"), [
    (RecordDict({**changed(), "more": ConfigRecord({"x": 1})}), "must have the record 'report'"),
    (RecordDict({"report": MetricRecord({"round": 2})}), "a report without test_samples, train_"),
    (changed(seconds__train=math.inf), "seconds.train is not a finite number"),
    (changed(train_samples=-3), "report.train_samples is "),
    (changed(validation_samples=-3), "report.validation_samples is "),
    (
        changed(validation_samples=9, validation__head=1.5),
        "an accuracy, or a metric that is a share, above 1",
    ),
    (changed(validation_samples=9, validation__head=-0.5), "report.validation.head is "),
    (changed(validation_samples=9, validation__features=0.5), "report.validation.features is "),
    (changed(validation__head=0.5), "without validation samples"),
    (changed(seconds__train=-1.0), "report.seconds.train is "),
    (changed(class_counts=[1, 2]), "class_counts"),
    (changed(secret=3), "report.secret is "),
    (changed(**{f"losses__{i}": 1.0 for i in range(99)}), "report.losses.0 is "),
])  # fmt: skip
def test_a_bad_report_is_refused_with_its_reason(content, said):
    with pytest.raises(RefusedMessage, match=re.escape(said)):
        records.unpack_report(content, 2, LOSSES)


def test_a_metric_that_is_a_share_is_one_and_others_are_as_they_are():
    """No client can decide which round is the best by reporting a huge AUC.

    Which values a user's own metric may have is not known.
    """
    own = "head/mine:loss"
    metrics = {own, "head/auc"}
    right = {"validation_samples": 9}
    for group in ("metrics", "validation"):
        right |= {f"{group}.{own}": -3.0, f"{group}.head/auc": 1.0}
    records.unpack_report(changed(**right), 2, LOSSES, metrics)

    for group in ("metrics", "validation"):
        for value, said in ((7.0, "a metric that is a share, above 1"), (-0.1, "head/auc is -0.1")):
            wrong = changed(**{**right, f"{group}.head/auc": value})
            with pytest.raises(RefusedMessage, match=said):
                records.unpack_report(wrong, 2, LOSSES, metrics)


def test_the_best_round_survives_a_round_trip():
    """The data that chose it are told in the final message only."""
    best = {"metric": "head", "after": 3, "on": "test"}
    # while a better round may follow, the data that chose this one are not told
    during = RecordDict(dict(records.pack_best(best)))
    at_the_end = RecordDict(dict(records.pack_best(best, final=True)))

    assert records.unpack_best(RecordDict()) == (-1, "")
    assert records.unpack_best(during) == (3, "")
    assert records.unpack_best(at_the_end) == (3, "test")


@pytest.mark.parametrize(
    "record", [{"after": 1}, {"after": "1", "on": ""}, {"after": 1, "on": "../x"}]
)
def test_a_malformed_word_on_the_best_round_is_refused(record):
    with pytest.raises(RefusedMessage, match="best is"):
        records.unpack_best(RecordDict({"best": ConfigRecord(record)}))


def test_instructions_and_site_cards_survive_a_round_trip():
    instructions = records.Instructions(3, "run", run_history=RunHistory(13, ((11, 5), (12, 6))))
    content = RecordDict({"round": records.pack_instructions(instructions)})

    assert records.unpack_instructions(content) == instructions

    assert records.unpack_site_card(RecordDict({"site": records.pack_site_card(CARD)})) == CARD


def test_a_report_survives_a_round_trip():
    validation = {"head": 0.4, "head/auc": 0.5}
    report = dataclasses.replace(REPORT, validation_samples=5, validation=validation)
    packed = RecordDict({"report": records.pack_report(report, LOSSES, {"head/auc"})})

    assert records.unpack_report(packed, 2, LOSSES, {"head/auc"}) == report


@pytest.mark.parametrize("shape", [[], [0], [3, -1], [1] * 9, [2**13, 2**13], ["3"], [3.0]])
def test_an_introduction_with_an_impossible_input_shape_is_refused(shape):
    record = ConfigRecord({**records.pack_site_card(CARD), "input_shape": shape})
    with pytest.raises(RefusedMessage, match="input_shape"):
        records.unpack_site_card(RecordDict({"site": record}))


def test_malformed_instructions_are_refused():
    """Each value is put in the place of a right one."""
    with pytest.raises(RefusedMessage, match="no complete record 'round'"):
        records.unpack_instructions(RecordDict())

    right = {"round": 3, "run_name": "run", "run_history": "11:5,13", "counted": 2, "part": 0.5}
    wrong = {
        "round": ["3"],
        "part": [-0.1, 1.5, math.nan],
        "run_history": [13, "", "11:5:2,13", " 13", "-1", "1_1", "١", "1," * 500],
        "run_name": ["", "..", ".x", "a/b", "/abs", "a\\b", "x" * 201, "a\u202eb", "a\nb"],
    }
    for key, values in wrong.items():
        for value in values:
            record = ConfigRecord({**right, key: value})
            with pytest.raises(RefusedMessage, match=rf"round\.{key} is "):
                records.unpack_instructions(RecordDict({"round": record}))


# -- updates --------------------------------------------------------------------------------------

CHANGES = {"weights": Update()}
CHANGES_LIMITS = Limits(
    10, 3, weights={"weights": {"w": ("float32", (4, 3, 2)), "seen": ("int64", (5, 5))}}
)
SEEN = torch.ones(5, 5, dtype=torch.int64)


def unpack_change(**arrays):
    """What a server reads of an update with these arrays; ``w__left`` stands for ``w:left``."""
    weights = {name.replace("__", ":"): value for name, value in arrays.items()}
    content = pack_payload(Payload(weights=weights), CHANGES)
    return unpack_payload(content, CHANGES, CHANGES_LIMITS, required=True)


def test_a_matrix_comes_whole_or_as_the_product_of_its_factors():
    """The array w is a matrix of 4 × 6 numbers, sent whole or as 4 × 2 and 2 × 6."""
    left = torch.randn(4, 2)
    right = torch.randn(2, 6)
    product = (left @ right).reshape(4, 3, 2)
    received = unpack_change(w__left=left, w__right=right, seen=SEEN)

    assert_equal(received, Payload(weights={"w": product, "seen": SEEN}))

    whole = {"w": torch.randn(4, 3, 2), "seen": SEEN}

    assert_equal(unpack_change(**whole), Payload(weights=whole))


ONE_LEFT = torch.ones(4, 1)
ONE_RIGHT = torch.ones(1, 6)


@pytest.mark.parametrize(("arrays", "said"), [
    (
        {"w__left": torch.ones(4, 3), "w__right": torch.ones(3, 6)},
        "factors of weights w: 3 rows, not from 1 to 2",
    ),
    (
        {"w__left": torch.ones(4, 0), "w__right": torch.ones(0, 6)},
        "factors of weights w: 0 rows, not from 1 to 2",
    ),
    ({"w__left": torch.ones(4, 2), "w__right": ONE_RIGHT}, "w:left: shape 4×2 instead of 4×1"),
    ({"w__left": ONE_LEFT, "w__right": torch.ones(1, 5)}, "w:right: shape 1×5 instead of 1×6"),
    (
        {"w__left": ONE_LEFT, "w__right": torch.ones(1, 3, 2)},
        "w:right: shape 1×3×2 instead of 1×6",
    ),
    (
        {"w__left": ONE_LEFT.long(), "w__right": ONE_RIGHT},
        "int64 instead of raw-little-endian float32",
    ),
    ({"w__left": ONE_LEFT * math.nan, "w__right": ONE_RIGHT}, "w:left: NaN or infinity"),
    (
        {"w__left": ONE_LEFT * 1e30, "w__right": ONE_RIGHT * 1e30},
        "w: factors whose product is not finite",
    ),
    ({"w__left": ONE_LEFT}, "arrays do not fit: w, w:left"),
    (
        {"w__left": ONE_LEFT, "w__right": ONE_RIGHT, "w__right__left": ONE_LEFT},
        "do not fit: w:right:left",
    ),
    ({"w": torch.ones(1), "w__left": ONE_LEFT, "w__right": ONE_RIGHT}, "arrays do not fit: w"),
    ({}, "arrays do not fit: w"),
])  # fmt: skip
def test_wrong_factors_are_refused(arrays, said):
    with pytest.raises(RefusedMessage, match=re.escape(said)):
        unpack_change(**arrays, seen=SEEN)


def test_whole_numbers_come_in_no_factors_and_weights_neither():
    """Factors are for floating point arrays of an `Update`, not for `Weights`."""
    factors = {"seen:left": torch.ones(5, 1), "seen:right": torch.ones(1, 5)}
    content = pack_payload(Payload(weights={"w": torch.ones(4, 3, 2), **factors}), CHANGES)

    assert_refused(content, CHANGES, "arrays do not fit", CHANGES_LIMITS)

    declared = {"weights": Weights()}
    sent = {"w:left": ONE_LEFT, "w:right": ONE_RIGHT, "seen": SEEN}
    content = pack_payload(Payload(weights=sent), declared)

    assert_refused(content, declared, "arrays do not fit", CHANGES_LIMITS)


def test_factors_are_no_larger_than_their_matrix():
    """Factors of rank 3 have more numbers than a matrix of 4 × 6."""
    sent = {"w:left": torch.ones(4, 3), "w:right": torch.ones(3, 5), "seen": SEEN}
    content = pack_payload(Payload(weights=sent), CHANGES)

    # w is 4 · 24 bytes, and seen 8 · 25
    said = "308 bytes of arrays, where a valid reply has at most 296"

    assert_too_large(content, CHANGES, said, CHANGES_LIMITS)


def test_a_name_that_is_not_declared_is_an_error_and_not_an_entry_that_was_not_sent():
    """An algorithm that misspells a name would otherwise train alone, unseen."""
    declared = {"weights": Weights(), "prototypes": Vectors()}
    received = unpack_payload(pack_payload(Payload(), declared), declared, LIMITS, required=False)

    assert received.weights() is None

    said = "updat is not declared for this direction; declared: weights, prototypes"

    with pytest.raises(KeyError, match=said):
        received.weights("updat")


def some_content(numbers=6):
    """Return a record of each kind, with a value of each kind, and so many ``numbers``."""
    values = {"name": "run", "on": True, "keys": b"\0\1", "shape": [1, 2], "none": list[str]()}
    weights = Array(np.arange(numbers, dtype=np.float32))
    bias = Array(np.zeros((), np.int64))
    return RecordDict(
        {
            "weights": ArrayRecord({"w": weights, "b": bias}),
            "round": ConfigRecord(values),
            "report": MetricRecord({"loss": 0.5, "n": 3}),
        }
    )


def test_what_comes_out_of_an_envelope_is_what_was_put_in():
    """An envelope is put into none, and what is too large for one stays as it is."""
    envelope = put_in(some_content())

    assert take_out(envelope) == some_content()
    assert list(take_out(envelope)) == list(some_content())
    assert put_in(envelope) is envelope

    # Flower sends each nested object by itself: the whole, three records, two arrays, their chunks
    assert len(get_all_nested_objects(some_content())) == 8
    assert len(get_all_nested_objects(envelope)) == 2

    large = some_content(MAX_ENVELOPE_BYTES // 4 + 1)  # float32

    assert put_in(large) is large
    assert take_out(large) is large


def test_of_an_envelope_with_something_beside_nothing_comes_out():
    """Another record beside it, or another entry in it, makes it void."""
    envelope = put_in(some_content())
    beside = RecordDict({**envelope, "more": ConfigRecord({"bytes": bytes(9)})})

    assert take_out(beside) == RecordDict()

    record = ConfigRecord({**envelope.config_records[NAME], "more": bytes(9)})

    assert take_out(RecordDict({NAME: record})) == RecordDict()


@pytest.fixture
def _in_a_task(monkeypatch):
    """As in a process of Flower, where messages can be made."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.usefixtures("_in_a_task")
def test_what_goes_to_many_sites_is_in_memory_once():
    """Two messages of equal content share the bytes of one envelope."""
    first = Message(some_content(), 1, "train", group_id="1")
    second = Message(some_content(), 2, "train", group_id="1")
    grid = HttpGrid(token="any")
    grid._client = "of a SuperLink"
    grid.push_messages = lambda sent: []

    push_each(grid, [first, second])

    envelopes = [message.content.config_records[NAME] for message in (first, second)]

    assert envelopes[0]["content"] is envelopes[1]["content"]


NO_KIND = b"\x0a\x03\x0a\x01x"
"""A record without a kind."""


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord({"content": b"\xff\xff"}),
        ConfigRecord({"content": NO_KIND}),
        ConfigRecord({"content": 5}),
        ConfigRecord({"content": "words"}),
        ConfigRecord(),
        MetricRecord({"content": 1}),
    ],
)
def test_an_envelope_that_cannot_be_read_has_nothing_inside(record):
    assert take_out(RecordDict({NAME: record})) == RecordDict()


@pytest.mark.usefixtures("_in_a_task")
def test_a_client_answers_in_an_envelope_what_came_in_one():
    """A server that does not know envelopes is answered without."""
    handler = answered(lambda message, _: RecordDict({**message.content}))
    context = Context(1, 1, {}, RecordDict(), {})
    for sent in (some_content(), put_in(some_content())):
        message = Message(sent, 1, "query", group_id="1")
        message.metadata.__dict__["_message_id"] = "any"
        reply = handler(message, context)

        assert (NAME in reply.content) == (NAME in sent)
        assert take_out(reply.content) == some_content()
