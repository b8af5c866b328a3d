"""A small message as a single record: Flower sends each record, array and chunk of it by itself.

Each of these parts costs a SuperLink two requests, and most messages are of a few kilobytes in ten
parts.
"""

import json
from collections.abc import Mapping

from flwr.app import ConfigRecord, RecordDict
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from protofl_common.flower import recorddict_from_proto, recorddict_pb2, recorddict_to_proto
from protofl_common.wire.payloads import payload_bytes

NAME = "envelope"
# Bytes of arrays; larger messages go in Flower's parts, and it stores equal parts of them once.
MAX_ENVELOPE_BYTES = 2**20


def put_in(content: RecordDict, known_records: dict[bytes, bytes] | None = None) -> RecordDict:
    """Pack the records of a small message into one; return those of a large message as they are.

    ``known_records`` collects the packed bytes of all messages so far, so that messages with equal
    records share the same bytes in memory.
    """
    if NAME in content or payload_bytes(content) > MAX_ENVELOPE_BYTES:
        return content
    text: bytes = recorddict_to_proto(content).SerializeToString()
    if known_records is not None:
        text = known_records.setdefault(text, text)
    return RecordDict({NAME: ConfigRecord({"content": text})})


def take_out(content: RecordDict) -> RecordDict:
    """Return the records of a message in an envelope, and any other message as it is.

    An envelope that cannot be read gives no records, which every receiver refuses.
    """
    if NAME not in content:
        return content
    try:
        # Exactly one record with one value: anything beside it would not be checked or counted.
        (record,) = content.values()
        (text,) = record.values()
        return recorddict_from_proto(recorddict_pb2.RecordDict.FromString(text))
    except (DecodeError, TypeError, ValueError, LookupError, AttributeError):
        return RecordDict()


def check_parts(parts: Mapping[str, bytes], most: int) -> None:
    """Raise ValueError if a message's parts would become arrays of more than ``most`` bytes.

    ``parts`` are Flower's, by their ids. They must be checked before they are put together: one
    array may name a chunk of 5 MB a million times. KeyError if an array names a chunk that is not
    among the parts.
    """
    chunk_sizes = {}
    for name, part in parts.items():
        if part.startswith(b"ArrayChunk "):
            chunk_sizes[name] = len(part)

    size = 0
    for part in parts.values():
        if not part.startswith(b"Array "):
            continue
        # b"Array ID,ID,… LENGTH\0{…}": the ids of its chunks, and in JSON the places among these
        head, _, body = part.partition(b"\0")
        names = head.decode().split(" ")[1].split(",")
        for index in json.loads(body)["arraychunk_ids"]:
            size += chunk_sizes[names[index]]

    if size > most:
        received = sum(map(len, parts.values()))
        raise ValueError(f"{received} bytes that would become arrays of {size}")
