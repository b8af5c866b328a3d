"""The server's protections: their order, when each acts, and what a chain of them remembers."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from protofl_common.maths.prototypes import Prototypes
from server_app import protections
from server_app.protections import PROTECTIONS, protections_of
from server_app.protections.base import Accepted, Protection
from server_app.protections.changes import CutChanges
from server_app.protections.enough_replies import EnoughReplies
from server_app.protections.outliers import RefuseOutliers
from server_app.round import view_of
from server_app.run.bounds import Bounds
from tests.support.fakes import server_of, upload

ALWAYS = ["RefuseOutliers", "BoundSamples", "EnoughReplies"]


def test_every_protection_has_its_place():
    for path in Path(protections.__file__).parent.glob("*.py"):
        import_module(f"server_app.protections.{path.stem}")
    kinds = [type(protection) for protection in PROTECTIONS]

    assert set(kinds) == set(Protection.__subclasses__())
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(("algo", "settings", "more"), [
    ("fedavg", {}, []),
    ("fedavg", {"secagg": True}, None),
    ("fedavg", {"max_update_ratio": 2.0}, ["CutChanges"]),
    ("fedavg", {"liars": 1}, ["CutChanges"]),
    ("fedproto", {"merging": "median"}, []),  # a mean of prototypes is trimmed itself
    ("fedtgp", {"merging": "median"}, ["LeaveOutFarthest"]),
    ("fedplvm", {"merging": "median"}, ["LeaveOutFarthest", "BoundVectors"]),
    ("fpl", {}, []),
    ("mpft", {}, ["BoundVectors"]),
])  # fmt: skip
def test_protections_follow_from_settings(algo, settings, more):
    """``more``: which protections act beside `ALWAYS`; None: one alone, as there is only a sum."""
    view = view_of(server_of(algo, **settings))

    acting = [type(protection).__name__ for protection in protections_of(view)]

    if more is None:  # the server sees a sum alone
        assert acting == ["EnoughReplies"]
    else:
        assert acting == [*ALWAYS, *more]


def of_length(length, site):
    """Return a site's upload of one prototype, of this length."""
    vector = Prototypes(torch.tensor([[length]]), torch.tensor([0]))
    return upload(site, prototypes=vector)


def test_a_void_round_still_says_who_was_refused_and_no_protection_follows():
    """Of three uploads one is too long; two are fewer than ``min-replies``."""
    bounds = Bounds(max_norm_ratio=5)
    view = replace(view_of(server_of("fedproto")), fewest_replies=3, bounds=bounds)
    sent = [of_length(1.0, "a"), of_length(1.0, "b"), of_length(99.0, "c")]

    after_first = Accepted(sent).then(RefuseOutliers(), view)
    accepted = after_first.then(EnoughReplies(), view)

    assert accepted.why_void == "2 valid replies, fewer than min-replies = 3"
    assert accepted.refused.keys() == {"c"}
    assert accepted.kept == []
    # a protection that would find another reason is not asked
    another = replace(view, fewest_replies=9)
    assert accepted.then(EnoughReplies(), another) is accepted


def test_an_upload_says_what_fraction_of_each_change_is_left():
    """SCAFFOLD's next message tells its client, whose control variate then changes by as much.

    The median length of changes is 1, of which twice is left of 8.
    """
    server = server_of("scaffold", liars=1)
    view = view_of(server)
    moves = {"a": (0.1, 1.0), "b": (0.1, 1.0), "c": (0.1, 8.0)}
    uploads = []
    for site, (step, change) in moves.items():
        weights = {name: value + step for name, value in server.weights.items()}
        control = {name: value + change for name, value in server.control.items()}
        uploads.append(upload(site, weights=weights, control=control))

    accepted = CutChanges().accept(uploads, view)

    fractions = [server.used_fraction(kept) for kept in accepted.kept]
    assert fractions == [1.0, 1.0, pytest.approx(2 / 8)]

    said = "c: its change of the weights is cut to 2 times the median length (max-update-ratio)"
    assert accepted.reduced == {said}
