"""A reply's bytes, read as Flower reads them and written anew: both must be the same."""

import math
import re
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MessageType, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto import recorddict_pb2 as proto

from protofl_common.privacy.masks import PUBLIC, SEALED, SHARE, SIGNATURE
from protofl_common.wire.payloads import RAW
from protofl_common.wire.records import NEXT_SUM, SECAGG
from tests.support.declared import DECLARED, SITE, report_names

SECURE = {"query.advertise": PUBLIC + SIGNATURE, "query.share": SEALED, "query.unmask": SHARE}
SECURE |= {f"{stage}_final": size for stage, size in SECURE.items()}
"""The stages of secure aggregation -> bytes for each site."""

UPLOADS: set[str] = set()
for _declared in DECLARED.values():
    UPLOADS |= _declared.records
RECORDS: dict[str, set[str]] = {
    MessageType.QUERY: {"site"},
    MessageType.TRAIN: {"report", "masked", NEXT_SUM, *UPLOADS},
    MessageType.EVALUATE: {"report", "masked"},
    "query.best": set(),
    **{stage: {SECAGG} for stage in SECURE},
}
"""Kind of message -> all records that a reply may have, in any run."""
RECORDS["query.unmask"].add(NEXT_SUM)


def bytes_of(content: RecordDict) -> bytes:
    """As it travels."""
    return recorddict_to_proto(content).SerializeToString(deterministic=True)


def read_anew(
    algo: str, kind: str, text: bytes, metrics: tuple[str, ...] = ()
) -> tuple[set[str], dict[str, dict[str, np.ndarray]]]:
    """Read a reply, and refuse it if it has more than what is declared.

    ``text`` are the bytes of the reply to a message of this ``kind``, in a run of ``algo`` that
    asks for ``metrics``. Flower's records hold no unknown fields, and write what they hold in one
    way: if they give the same bytes, there was nothing else. Return the names of the records,
    without the head of the audit log that every reply of a site has, and record -> name -> array.
    """
    training = kind == MessageType.TRAIN
    content = recorddict_from_proto(proto.RecordDict.FromString(text))
    assert bytes_of(content) == text, "bytes beyond the declared values"
    arrays = {}
    for name, record in content.items():
        assert name in {*RECORDS[kind], "audit"}, "an undeclared record"
        if name == "audit":
            assert list(record) == ["head"]
            assert re.fullmatch("[0-9a-f]{64}", record["head"]), "not a SHA-256"
        elif name == "site":
            check_introduction(record)
        elif name == NEXT_SUM:
            check_bytes_of_sites(record, PUBLIC + SIGNATURE if training else SEALED)
        elif name == SECAGG:
            check_bytes_of_sites(record, SECURE[kind])
        elif name == "report":
            check_report(record, report_names(algo, training, metrics))
        else:
            arrays[name] = values_in(record)
    return content.keys() - {"audit"}, arrays


def check_bytes_of_sites(record: Any, size: int) -> None:
    """The record has ``size`` bytes for each of several sites."""
    for site, value in record.items():
        assert re.fullmatch(r"site-\d+", site), "an undeclared field"
        assert isinstance(value, bytes)
        assert len(value) == size


def values_in(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return name -> array; each has the bytes of its shape, and a type that may travel."""
    return {name: _values_of(array) for name, array in record.items()}


def _values_of(array: Array) -> np.ndarray:
    dtype = {"float32": "<f4", "float64": "<f8", "int64": "<i8"}[array.dtype]
    assert array.stype == RAW
    bytes_a_number = int(dtype[-1])
    assert len(array.data) == bytes_a_number * math.prod(array.shape), "bytes beyond the shape"
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def check_report(record: Any, allowed: set[str]) -> None:
    """The record has single numbers under the ``allowed`` names."""
    for name, value in record.items():
        assert name in allowed, f"an undeclared number {name}"
        assert type(value) in (int, float), "not a single number"


def check_introduction(record: Any) -> None:
    """The record has the declared fields of an introduction, all of them, in order."""
    assert list(record) == list(SITE), "an undeclared field"
    for name, value in record.items():
        assert type(value) is SITE[name]
        if isinstance(value, list):
            assert {type(entry) for entry in value} in ({str}, {int}, set())
