"""The wire: typed payloads to and from Flower's ``RecordDict``.

Both directions are declared in the catalog as an :class:`~protofl_common.exchange.Exchange` of named entries. Packing
anything undeclared is a programming error; unpacking checks every name, shape, dtype and range and raises
:class:`RefusedMessage` with the reason. Arrays travel as raw little-endian bytes: no pickle, and 4 bytes a number.

Records of a message
    an entry's name one for each declared entry, such as ``prototypes`` and ``weights``, with the arrays
                    of `Vectors`     means [P, W] float32, labels [P] int64, and counts [P] int64 where declared
                    of `VectorSets`  the same of every client, one after another, with owners [P] int64
                    of `Weights`     the declared part of a module's state dict
    ``insight``     client to server, after the last round, where asked for and allowed: :class:`Insight`
    ``round``       server to client: :class:`Instructions`
    ``report``      client to server: :class:`Report`, scalars only
    ``site``        client to server, once: :class:`SiteCard`
"""

from __future__ import annotations

from protofl_common.messages.arrays import RAW
from protofl_common.messages.limits import Limits, Template
from protofl_common.messages.payloads import (
    MAX_SETS,
    Payload,
    StateDict,
    Value,
    check_size,
    pack_payload,
    part_of,
    payload_bytes,
    template_of,
    unpack_payload,
)
from protofl_common.messages.refusal import RefusedMessage
from protofl_common.messages.scalars import (
    INFERENCES,
    PHASES,
    Instructions,
    Report,
    SiteCard,
    pack_instructions,
    pack_report,
    pack_site_card,
    unpack_instructions,
    unpack_report,
    unpack_site_card,
)

__all__ = [
    "INFERENCES",
    "MAX_SETS",
    "PHASES",
    "RAW",
    "Instructions",
    "Limits",
    "Payload",
    "RefusedMessage",
    "Report",
    "SiteCard",
    "StateDict",
    "Template",
    "Value",
    "check_size",
    "pack_instructions",
    "pack_payload",
    "pack_report",
    "pack_site_card",
    "part_of",
    "payload_bytes",
    "template_of",
    "unpack_instructions",
    "unpack_payload",
    "unpack_report",
    "unpack_site_card",
]
