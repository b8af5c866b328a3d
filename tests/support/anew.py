"""A reply's bytes read with NumPy and written anew: both must be the same."""

import math
import re
from typing import Any

import numpy as np
from flwr.app import MessageType, RecordDict
from flwr.common.serde import recorddict_to_proto
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
    """Read the declared values of a reply, write them anew, and refuse it if the bytes differ.

    ``text`` are the bytes of the reply to a message of this ``kind``, in a run of ``algo`` that
    asks for ``metrics``. Return the names of its records, without the head of the audit log that
    every reply of a site has, and record -> name -> array.
    """
    training = kind == MessageType.TRAIN
    message = proto.RecordDict.FromString(text)
    anew = proto.RecordDict()
    names = set()
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for item in message.items:  # in the order found
        name = item.key
        if name not in {*RECORDS[kind], "audit"}:  # left out here, it makes the bytes differ
            continue
        written = proto.RecordDict.Item(key=name)
        if name == "audit":
            written.config_record.CopyFrom(head_anew(item.config_record))
        elif name == "site":
            written.config_record.CopyFrom(site_anew(item.config_record))
        elif name == NEXT_SUM:
            size = PUBLIC + SIGNATURE if training else SEALED
            written.config_record.CopyFrom(bytes_anew(size, item.config_record))
        elif name == SECAGG:
            written.config_record.CopyFrom(bytes_anew(SECURE[kind], item.config_record))
        elif name == "report":
            allowed = report_names(algo, training, metrics)
            written.metric_record.CopyFrom(report_anew(item.metric_record, allowed))
        else:
            record, arrays[name] = arrays_anew(item.array_record)
            written.array_record.CopyFrom(record)
        anew.items.append(written)
        if name != "audit":
            names.add(name)
    assert anew.SerializeToString(deterministic=True) == text, "bytes beyond the declared values"
    return names, arrays


def head_anew(record: Any) -> Any:
    """Return the record anew: the head of a site's audit log, a SHA-256, and nothing else."""
    (item,) = record.items
    assert item.key == "head"
    assert re.fullmatch("[0-9a-f]{64}", item.value.string)
    return proto.ConfigRecord(items=[_config_item("head", string=item.value.string)])


def bytes_anew(size: int, record: Any) -> Any:
    """Return the record anew: ``size`` bytes for each of several sites."""
    anew = proto.ConfigRecord()
    for item in record.items:
        assert re.fullmatch(r"site-\d+", item.key), "an undeclared field"
        assert len(item.value.bytes) == size
        anew.items.append(_config_item(item.key, bytes=item.value.bytes))
    return anew


def _config_item(key: str, **value: Any) -> Any:
    return proto.ConfigRecord.Item(key=key, value=proto.ConfigRecordValue(**value))


def arrays_anew(record: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Return the record anew, each array rebuilt from its numbers, and name -> array."""
    anew = proto.ArrayRecord()
    arrays = {}
    for item in record.items:
        array = item.value
        dtype = {"float32": "<f4", "float64": "<f8", "int64": "<i8"}[array.dtype]
        shape = tuple(array.shape)
        bytes_a_number = int(dtype[-1])
        assert len(array.data) == bytes_a_number * math.prod(shape), "bytes beyond the shape"
        values = np.frombuffer(array.data, dtype).reshape(shape)
        data = values.astype(dtype).tobytes()
        rebuilt = proto.Array(dtype=array.dtype, shape=values.shape, stype=RAW, data=data)
        anew.items.append(proto.ArrayRecord.Item(key=item.key, value=rebuilt))
        arrays[item.key] = values
    return anew, arrays


def report_anew(record: Any, allowed: set[str]) -> Any:
    """Return the record anew: single numbers under the ``allowed`` names."""
    anew = proto.MetricRecord()
    for item in record.items:
        assert item.key in allowed, f"an undeclared number {item.key}"
        kind = item.value.WhichOneof("value")
        assert kind in ("double", "sint64"), "not a single number"
        value = proto.MetricRecordValue(**{kind: getattr(item.value, kind)})
        anew.items.append(proto.MetricRecord.Item(key=item.key, value=value))
    return anew


KINDS = {
    int: ("sint64",),
    bool: ("bool",),
    str: ("string",),
    list: ("string_list", "sint_list", "bool_list"),
}
"""Type of a field of an introduction -> how Flower may write it."""


def site_anew(record: Any) -> Any:
    """Return the record anew: the declared fields of an introduction, all of them, in order."""
    anew = proto.ConfigRecord()
    assert [item.key for item in record.items] == list(SITE), "an undeclared field"
    for item in record.items:
        kind = item.value.WhichOneof("value")
        assert kind in KINDS[SITE[item.key]]
        value = getattr(item.value, kind)
        if kind == "bool_list":
            assert not value.vals  # Flower's way to write an empty list
        if kind.endswith("list"):
            value = type(value)(vals=list(value.vals))
        anew.items.append(_config_item(item.key, **{kind: value}))
    return anew
