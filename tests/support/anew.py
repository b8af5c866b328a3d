"""A reply's bytes read with NumPy and written anew: both must be the same."""

import math
import re
from collections.abc import Callable
from functools import partial
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
"""The stages of secure aggregation beside the training and the final evaluation -> bytes for each site."""
RECORDS: dict[str, set[str]] = {
    MessageType.QUERY: {"site"},
    MessageType.TRAIN: {
        "report",
        "masked",
        NEXT_SUM,
        *(name for one in DECLARED.values() for name in one.records),
    },
    MessageType.EVALUATE: {"report", "masked"},
    "query.best": set(),
    **{stage: {SECAGG, NEXT_SUM} if stage == "query.unmask" else {SECAGG} for stage in SECURE},
}
"""Kind of message -> all records that a reply may have, in any run."""


def bytes_of(content: RecordDict) -> bytes:
    """As it travels."""
    return recorddict_to_proto(content).SerializeToString(deterministic=True)


def read_anew(
    algo: str, kind: str, text: bytes, metrics: tuple[str, ...] = ()
) -> tuple[set[str], dict[str, dict[str, np.ndarray]]]:
    """Read the declared values of a reply, write them anew, and compare; names of the records, and the arrays read."""
    message, anew = proto.RecordDict.FromString(text), proto.RecordDict()
    arrays: dict[str, dict[str, np.ndarray]] = {}
    next_size = PUBLIC + SIGNATURE if kind == MessageType.TRAIN else SEALED
    configs: dict[str, Callable[[Any], Any]] = {"audit": head_anew, "site": site_anew,
        NEXT_SUM: partial(bytes_anew, next_size), SECAGG: partial(bytes_anew, SECURE.get(kind, 0))}  # fmt: skip
    for item in message.items:  # in the order found
        made = proto.RecordDict.Item(key=item.key)
        if item.key not in {*RECORDS[kind], "audit"}:
            continue
        if item.key in configs:
            made.config_record.CopyFrom(configs[item.key](item.config_record))
        elif item.key == "report":
            allowed = report_names(algo, kind == MessageType.TRAIN, metrics)
            made.metric_record.CopyFrom(report_anew(item.metric_record, allowed))
        else:
            record, arrays[item.key] = arrays_anew(item.array_record)
            made.array_record.CopyFrom(record)
        anew.items.append(made)
    assert anew.SerializeToString(deterministic=True) == text, "bytes beyond the declared values"
    return {item.key for item in message.items} - {"audit"}, arrays


def head_anew(record: Any) -> Any:
    """The head of a site's audit log, a SHA-256."""
    (item,) = record.items
    assert item.key == "head"
    assert re.fullmatch("[0-9a-f]{64}", item.value.string)
    value = proto.ConfigRecordValue(string=item.value.string)
    return proto.ConfigRecord(items=[proto.ConfigRecord.Item(key="head", value=value)])


def bytes_anew(size: int, record: Any) -> Any:
    """So many bytes for each of several sites."""
    made = proto.ConfigRecord()
    for item in record.items:
        assert re.fullmatch(r"site-\d+", item.key), "an undeclared field"
        assert len(item.value.bytes) == size
        made.items.append(
            proto.ConfigRecord.Item(
                key=item.key, value=proto.ConfigRecordValue(bytes=item.value.bytes)
            )
        )
    return made


def arrays_anew(record: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Each array rebuilt from its numbers."""
    made, values = proto.ArrayRecord(), {}
    for item in record.items:
        array = item.value
        dtype = {"float32": "<f4", "float64": "<f8", "int64": "<i8"}[array.dtype]
        assert len(array.data) == int(dtype[2]) * math.prod(array.shape), "bytes beyond the shape"
        values[item.key] = np.frombuffer(array.data, dtype).reshape(tuple(array.shape))
        data, shape = values[item.key].astype(dtype).tobytes(), values[item.key].shape
        rebuilt = proto.Array(dtype=array.dtype, shape=shape, stype=RAW, data=data)
        made.items.append(proto.ArrayRecord.Item(key=item.key, value=rebuilt))
    return made, values


def report_anew(record: Any, allowed: set[str]) -> Any:
    """Single numbers under declared names."""
    made = proto.MetricRecord()
    for item in record.items:
        assert item.key in allowed, f"an undeclared number {item.key}"
        kind = item.value.WhichOneof("value")
        assert kind in ("double", "sint64"), "not a single number"
        value = proto.MetricRecordValue(**{kind: getattr(item.value, kind)})
        made.items.append(proto.MetricRecord.Item(key=item.key, value=value))
    return made


def site_anew(record: Any) -> Any:
    """The declared fields of an introduction, all of them."""
    made = proto.ConfigRecord()
    assert [item.key for item in record.items] == list(SITE), "an undeclared field"
    for item in record.items:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        wanted = {
            int: ("sint64",),
            bool: ("bool",),
            str: ("string",),
            list: ("string_list", "sint_list", "bool_list"),
        }
        assert kind in wanted[SITE[item.key]]
        if kind.endswith("list"):
            assert kind != "bool_list" or not value.vals  # Flower's way to write an empty list
            value = type(value)(vals=list(value.vals))
        made.items.append(
            proto.ConfigRecord.Item(key=item.key, value=proto.ConfigRecordValue(**{kind: value}))
        )
    return made
