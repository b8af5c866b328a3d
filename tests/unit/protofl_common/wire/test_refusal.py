"""The record of a refusal: read_error_with whole, or as the words of somebody unnamed."""

import json
from types import SimpleNamespace

import pytest
from flwr.app import Error
from hypothesis import given
from hypothesis import strategies as st

from protofl_common.basics.text import is_site_name, printable
from protofl_common.wire.refusal import Refusal, pack_refusal, refusal_in
from tests.support.rubbish import TEXTS, VALUES

SIGNATURE = "0f" * 64
HONEST = {"text": "denied", "kind": "waiting", "site": "north", "signature": SIGNATURE}


def read_error_with(reason):
    """Return what is read_error_with of an error reply with this text."""
    reply = SimpleNamespace(error=Error(2, reason))  # a true one wants a Flower run
    return refusal_in(reply)


def test_what_a_site_writes_is_read_as_it_was_written():
    """A text is longest if it has signs that are not printable, each of which becomes several."""
    longest = Refusal(printable("\U0010ffff" * 1000), "waiting", "n" * 100, SIGNATURE)

    assert read_error_with(pack_refusal(Refusal(**HONEST))) == Refusal(**HONEST)
    assert read_error_with(pack_refusal(longest)).site == longest.site


@pytest.mark.parametrize("reason", [
    "site north: denied at north",
    "<class 'ray.exceptions.ActorDiedError'>:<'The actor died'>",
    "\x1b[2J" + "x" * 10**6,
    "{}",
    "[" * 8000,
    json.dumps(HONEST) + "x",
    json.dumps(HONEST | {"text": "x" * 10**4}),
    json.dumps(HONEST | {"text": 1}),
    json.dumps(HONEST | {"kind": "approved"}),
    json.dumps(HONEST | {"site": "north\n"}),
    json.dumps(HONEST | {"site": "../north"}),
    json.dumps(HONEST | {"signature": SIGNATURE.upper()}),
    json.dumps(HONEST | {"signature": f"{SIGNATURE}\n"}),
    json.dumps(HONEST | {"age": 5}),
])  # fmt: skip
def test_what_is_no_whole_record_names_nobody(reason):
    assert read_error_with(reason) == Refusal(printable(reason))


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from([*HONEST, "age"]), VALUES | st.sampled_from([*HONEST.values()]))
)
def test_rubbish_is_short_and_plain(changes):
    """Whatever stands in the record, what is read_error_with is fit for a log."""
    refusal = read_error_with(json.dumps(HONEST | changes, default=repr))

    assert refusal.text.isprintable()
    assert len(refusal.text) < 4100  # 500 characters; unprintable ones are written as several
    assert refusal.kind in ("failed", "waiting", "lost-state")
    assert not refusal.site or is_site_name(refusal.site)
    assert len(refusal.signature) in (0, 128)  # none, or 64 bytes in hexadecimal


@given(TEXTS)
def test_any_text_is_read(reason):
    assert read_error_with(reason).site == ""
