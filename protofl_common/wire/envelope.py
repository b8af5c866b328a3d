"""A small message as a single record: Flower sends each record, array and chunk of a message by itself.

Each of these parts costs a SuperLink two requests, and most messages are of a few kilobytes in ten parts.
"""

import json
from collections.abc import Mapping

from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from protofl_common.wire.payloads import payload_bytes

NAME = "envelope"
LARGEST = 2**20  # Bytes of arrays; more goes in Flower's parts, of which it stores those of several messages once


def put_in(content: RecordDict, alike: dict[bytes, bytes] | None = None) -> RecordDict:
    """Return the content as one record, of which equal ones are in memory once (``alike``); as it is where large."""
    if NAME in content or payload_bytes(content) > LARGEST:
        return content
    text: bytes = recorddict_to_proto(content).SerializeToString()
    text = text if alike is None else alike.setdefault(text, text)
    return RecordDict({NAME: ConfigRecord({"content": text})})


def take_out(content: RecordDict) -> RecordDict:
    """Return the records inside, or the content as it is if it is in none; nothing, which all refuse, if unreadable."""
    if NAME not in content:
        return content
    try:
        (record,) = content.values()  # What lay beside it would pass every check, and no figure would count it
        (text,) = record.values()
        return recorddict_from_proto(RecordDictProto.FromString(text))
    except (DecodeError, TypeError, ValueError, LookupError, AttributeError):
        return RecordDict()


def check_parts(parts: Mapping[str, bytes], most: int) -> None:
    """ValueError for arrays of more bytes: one may name a chunk of 5 MB a million times. KeyError for one of arrays."""
    size, chunks = 0, {name: len(part) for name, part in parts.items() if part.startswith(b"ArrayChunk ")}
    for head, _, body in (part.partition(b"\0") for part in parts.values() if part.startswith(b"Array ")):
        names = head.decode().split(" ")[1].split(",")
        size += sum(chunks[names[index]] for index in json.loads(body)["arraychunk_ids"])
    if size > most:
        raise ValueError(f"{sum(map(len, parts.values()))} bytes that would become arrays of {size}")
