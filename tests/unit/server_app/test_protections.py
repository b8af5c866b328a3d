"""The server's protections: their order, when each acts, and what a chain of them remembers."""

from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest
import torch

from protofl_common.maths.prototypes import Prototypes
from server_app import protections
from server_app.protections import PROTECTIONS
from server_app.protections.base import Accepted
from server_app.protections.changes import cut_changes
from server_app.protections.enough_replies import enough_replies
from server_app.protections.outliers import refuse_outliers
from server_app.run.bounds import Bounds
from tests.support.fakes import server_of, upload

ALWAYS = ["refuse_outliers", "bound_samples"]


def test_every_protection_has_its_place():
    found = set()
    for path in Path(protections.__file__).parent.glob("*.py"):
        module = import_module(f"server_app.protections.{path.stem}")
        for value in vars(module).values():
            returns = getattr(value, "__annotations__", {}).get("return")
            if isinstance(value, FunctionType) and returns is Accepted:
                found.add(value)

    assert set(PROTECTIONS) == found
    assert len(set(PROTECTIONS)) == len(PROTECTIONS)


@pytest.mark.parametrize(("algo", "settings", "more"), [
    ("fedavg", {}, []),
    ("fedavg", {"secagg": True}, None),
    ("fedavg", {"max_update_ratio": 2.0}, ["cut_changes"]),
    ("fedavg", {"liars": 1}, ["cut_changes"]),
    ("fedproto", {"merging": "median"}, []),  # a mean of prototypes is trimmed itself
    ("fedtgp", {"merging": "median"}, ["leave_out_farthest"]),
    ("fedplvm", {"merging": "median"}, ["leave_out_farthest", "bound_vectors"]),
    ("fpl", {}, []),
    ("mpft", {}, ["bound_vectors"]),
])  # fmt: skip
def test_protections_follow_from_settings(algo, settings, more):
    """``more``: which protections look at uploads beside `ALWAYS`; None: none, as there is a sum.

    All rounds need enough replies.
    """
    server = server_of(algo, **settings)
    server.federation.cards["site-0"].train_samples = 10
    server.federation.cards["site-0"].present = (0,)
    sent = [upload("site-0", **entries_of(server))]

    acting = []
    for protection in PROTECTIONS:
        if protection(sent, server).kept is not sent:
            acting.append(protection.__name__)

    assert acting == ([] if more is None else [*ALWAYS, *more])
    server.federation.fewest_replies = 2
    assert enough_replies(sent, server).why_void


def entries_of(server):
    """Return what a client uploads: the server's own weights, or a prototype of one class."""
    entries = {}
    for name in server.settings.exchange.up:
        vector = Prototypes(torch.ones(1, 1), torch.tensor([0]))
        entries[name] = server.value_of(name) if name == "weights" else vector
    return entries


def of_length(length, site):
    """Return a site's upload of one prototype, of this length."""
    vector = Prototypes(torch.tensor([[length]]), torch.tensor([0]))
    return upload(site, prototypes=vector)


def test_a_void_round_still_says_who_was_refused_and_no_protection_follows():
    """Of three uploads one is too long; two are fewer than ``min-replies``."""
    server = server_of("fedproto")
    server.federation.bounds = Bounds(max_norm_ratio=5)
    server.federation.fewest_replies = 3
    sent = [of_length(1.0, "a"), of_length(1.0, "b"), of_length(99.0, "c")]

    after_first = Accepted(sent).then(refuse_outliers, server)
    accepted = after_first.then(enough_replies, server)

    assert accepted.why_void == "2 valid replies, fewer than min-replies = 3"
    assert accepted.refused.keys() == {"c"}
    assert accepted.kept == []
    # a protection that would find another reason is not asked
    server.federation.fewest_replies = 9
    assert accepted.then(enough_replies, server) is accepted


def test_an_upload_says_what_fraction_of_each_change_is_left():
    """SCAFFOLD's next message tells its client, whose control variate then changes by as much.

    The median length of changes is 1, of which twice is left of 8.
    """
    server = server_of("scaffold", liars=1)
    moves = {"a": (0.1, 1.0), "b": (0.1, 1.0), "c": (0.1, 8.0)}
    uploads = []
    for site, (step, change) in moves.items():
        weights = {name: value + step for name, value in server.weights.items()}
        control = {name: value + change for name, value in server.control.items()}
        uploads.append(upload(site, weights=weights, control=control))

    accepted = cut_changes(uploads, server)

    fractions = [server.used_fraction(kept) for kept in accepted.kept]
    assert fractions == [1.0, 1.0, pytest.approx(2 / 8)]

    said = "c: its change of the weights is cut to 2 times the median length (max-update-ratio)"
    assert accepted.reduced == {said}
