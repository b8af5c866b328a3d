"""What a hostile client may send, by name, each with the line that the server says of it.

They are changes of what FedProto sends with five classes, features of 64 numbers, 30 training and
60 test samples. `tests/federation/test_hostile.py` sends all of them to one server;
`test_wire_privacy.py` lets its own reader of bytes find those that carry more than is declared.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, MetricRecord

from protofl_common.wire.payloads import RAW
from tests.support.attacks import (
    Change,
    card_with,
    card_without,
    empty,
    extra,
    flipped,
    prototypes_with,
    raw,
    report_with,
    scaled,
)

GIGABYTE = 2**30
ZEROS = bytes(GIGABYTE)  # pages of zeros that are never touched take no memory
FEATURES = raw(np.zeros((30, 64), np.float32))


def rows(number: int) -> Change:
    """Send so many prototypes, all of class 0 and of one sample each."""
    return prototypes_with(
        means=lambda means: np.ones((number, means.shape[1]), np.float32),
        labels=lambda _: np.zeros(number, np.int64),
        counts=lambda _: np.ones(number, np.int64),
    )


def class_it_lacks(labels: np.ndarray) -> np.ndarray:
    """Replace the last label by that of a class which the client does not hold."""
    lacking = set(range(10)) - set(labels.tolist())
    return np.append(labels[:-1], min(lacking))


def as_said(shape: tuple[int, ...]) -> Change:
    """Send the honest bytes of the means, and say that they have this shape."""
    return prototypes_with(means=lambda means: Array("float32", shape, RAW, means.tobytes()))


def with_truth_value(means: np.ndarray) -> Array:
    """Return the honest means with ``True`` in their shape, which Python takes for a 1."""
    return Array("float32", (len(means), True * 64, True), RAW, means.tobytes())


def with_bytes(values: bytes, stype: str = RAW) -> Change:
    """Send these bytes, and say that they are the means, in the encoding ``stype``."""
    return prototypes_with(means=lambda means: Array("float32", means.shape, stype, values))


NO_COMPLETE_RECORD = "no complete record 'site'; is the other side's ProtoFL of"

ATTACKS: dict[str, dict[str, tuple[Change, str]]] = {
    MessageType.QUERY: {
        "a path for a name": (
            card_with(name="../../etc"),
            "site.name is '../../etc', not a name of ASCII letters",
        ),
        "no name": (card_with(name=""), "site.name is ''"),
        "an endless name": (
            card_with(name="x" * 10**6),
            "site.name with a name that is too long or not printable (1000000 characters)",
        ),
        "a name that clears the screen": (
            card_with(name="\x1b[2J"),
            "site.name with a name that is too long or not printable (4 characters)",
        ),
        "a partition below 0": (card_with(partition=-1), "site.partition is -1"),
        "a word for a number": (card_with(train_samples="30"), "site.train_samples is '30'"),
        "more samples than there are people": (
            card_with(train_samples=2**62),
            "site.train_samples is 4611686018427387904",
        ),
        "numbers for names of classes": (
            card_with(classes=[1, 2, 3]),
            "site.classes is [1, 2, 3], not a list of names",
        ),
        "bytes for names of classes": (
            card_with(classes=[b"zero"]),
            "site.classes is [b'zero'], not a list of names",
        ),
        "a class twice": (card_with(present=[0, 0]), "site.present is [0, 0]"),
        "classes in another order": (
            card_with(present=[3, 1]),
            "site.present is [3, 1], not labels of its classes in ascending order",
        ),
        "a class that nobody has": (card_with(present=[10]), "site.present is [10]"),
        "a word for a class": (card_with(present=["0"]), "site.present is ['0']"),
        "a field more": (card_with(secret=[0.5] * 64), NO_COMPLETE_RECORD),
        "a field less, as of an older version": (card_without("found"), NO_COMPLETE_RECORD),
    },
    MessageType.TRAIN: {
        # arrays that are not as declared
        "wrong dimension": (
            prototypes_with(means=lambda means: means[:, :-1].copy()),
            "means: shape 5×63 instead of 5×64",
        ),
        "wrong dtype": (
            prototypes_with(means=lambda means: means.astype(np.float16)),
            "float16 instead of",
        ),
        "labels of another dtype": (
            prototypes_with(labels=lambda labels: labels.astype(np.int32)),
            "int32 instead of",
        ),
        "a pickle": (with_bytes(b"cos\nsystem", "pickle"), "pickle"),
        "a million said, few sent": (
            as_said((10**6, 64)),
            "prototypes: 1000000 rows, not from 1 to 10",
        ),
        "a shape with a truth value": (
            prototypes_with(means=with_truth_value),
            "64, True), not whole numbers",
        ),
        "bytes after an array": (
            prototypes_with(
                means=lambda means: Array("float32", means.shape, RAW, means.tobytes() + b"more")
            ),
            "bytes do not fill the shape",
        ),
        # more than a valid reply has
        "a thousand prototypes": (
            rows(1000),
            "bytes of arrays, where a valid reply has at most 2720",
        ),
        "a gigabyte in the prototypes": (with_bytes(ZEROS), "bytes of arrays, where a valid reply"),
        "a gigabyte beside them": (
            extra("more", ArrayRecord({"x": Array("float32", (GIGABYTE // 4,), RAW, ZEROS)})),
            "bytes of arrays, where a valid reply",
        ),
        "features beside the prototypes": (
            extra("features", ArrayRecord({"z": FEATURES})),
            "bytes of arrays, where a valid reply",
        ),
        "features among the prototypes": (
            prototypes_with(features=lambda _: FEATURES),
            "bytes of arrays, where a valid reply",
        ),
        # labels and values that no honest client has
        "label out of range": (
            prototypes_with(labels=lambda labels: labels + 10),
            "label outside 0..9",
        ),
        "negative label": (
            prototypes_with(labels=lambda labels: labels - 10),
            "label outside 0..9",
        ),
        "duplicate labels": (
            prototypes_with(labels=lambda labels: labels * 0 + labels[0]),
            "with the same label, not at most 1",
        ),
        "a class it does not hold": (
            prototypes_with(labels=class_it_lacks),
            "did not declare when it joined",
        ),
        "labels flipped to others' classes": (flipped(10), "did not declare when it joined"),
        "NaN": (
            prototypes_with(means=lambda means: means * np.float32(np.nan)),
            "prototypes means: NaN or infinity",
        ),
        "infinity": (
            prototypes_with(means=lambda means: means + np.float32(np.inf)),
            "NaN or infinity",
        ),
        "scaled by 10^6": (scaled(1e6), "(max-prototype-norm)"),
        # an absolute limit lets short ones grow by 10^6
        "scaled by 2000": (scaled(2000), "times the round's median"),
        "a count below 1": (
            prototypes_with(counts=lambda counts: counts * 0),
            "prototypes with a count of samples below 1",
        ),
        "inflated counts": (
            prototypes_with(counts=lambda counts: counts + 2**62),
            "but it has 30 for training",
        ),
        # reports
        "inflated samples": (
            report_with(train_samples=10**12),
            "train_samples = 1000000000000, but it joined with 30",
        ),
        "no samples": (report_with(train_samples=0), "without training samples"),
        "too many correct": (
            report_with(correct__head=10**6),
            "more correct predictions than test samples",
        ),
        "endless loss": (report_with(losses__total=float("nan")), "not a finite number"),
        "an undeclared number": (
            report_with(losses__feature=0.5),
            "report.losses.feature is 0.5: the name is not declared",
        ),
        "a list in place of a number": (
            report_with(train_samples=[10, 20]),
            "a report whose train_samples is not a finite number",
        ),
        # records that are not declared, or are missing
        "an undeclared text": (
            extra("note", ConfigRecord({"x": "y" * 10**6})),
            "a reply must have the record 'report'",
        ),
        "a reply with a record more": (
            extra("more", MetricRecord({"x": 1})),
            "a reply must have the record 'report'",
        ),
        "weights": (
            extra("weights", ArrayRecord({"w": raw(np.zeros(3, np.float32))})),
            "undeclared array record",
        ),
        "nothing in it": (empty, "a reply must have the record 'report'"),
        "a reply of another round": (report_with(round=7), "a reply to round 7 in round"),
    },
    MessageType.EVALUATE: {
        "an undeclared record": (
            extra("label_counts", ArrayRecord({"counts": raw(np.zeros(0, np.int64))})),
            "an undeclared array record 'label_counts'",
        ),
        "losses of no training": (
            report_with(losses__total=1.0, train_samples=0),
            "report.losses.total is 1.0: the name is not declared, or the value out of range",
        ),
    },
}
"""Kind of message -> attack in a reply to it -> what the server says."""
