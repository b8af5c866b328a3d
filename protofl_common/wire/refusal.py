"""Why a client has not done what it was asked: the record in the reason of its reply's error.

It is one line of JSON. Whoever reads it believes nothing in it but a signature that is true.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from flwr.app import Message
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from protofl_common.basics.text import is_site_name, printable

_MOST_CHARACTERS = 8192  # of a record; a text has 500 or so, each of which may be written as ten


def _site_name(text: str) -> str:
    if text and not is_site_name(text):
        raise ValueError("no site's name")
    return text


@dataclass(frozen=True)
class Refusal:
    """What a client says in place of a reply."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    text: str  # One line for people, with nothing of the client's data
    # waiting: a site's operator has not decided yet, so it is asked again;
    # lost-state: a simulated client cannot go on, so the run ends
    kind: Literal["failed", "waiting", "lost-state"] = "failed"
    # Who says so; "" where the server knows it
    site: Annotated[str, AfterValidator(_site_name)] = ""
    # With the site's key, of the study and the run; "" where the study names no sites
    signature: Annotated[str, Field(pattern="^([0-9a-f]{128})?$")] = ""


_RECORD = TypeAdapter(Refusal)


def pack_refusal(refusal: Refusal) -> str:
    return json.dumps(asdict(refusal), ensure_ascii=False)


def refusal_in(reply: Message) -> Refusal:
    """Read the error of a reply, whoever wrote it; the text is short and printable.

    An error that is no such record, such as one of Flower's, becomes a refusal of no named site.
    """
    reason = str(reply.error.reason)
    if len(reason) <= _MOST_CHARACTERS:
        with suppress(ValidationError):
            refusal = _RECORD.validate_json(reason)
            return replace(refusal, text=printable(refusal.text))
    return Refusal(printable(reason))
