"""FedTGP's server: margins by hand, and what is trained and sent; `tests/unit/reference` has the whole step."""

import math
from typing import Any

import pytest
import torch

from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.replies import Upload
from server_app.strategies.fedtgp import FedTGP
from tests.support.fakes import server_of


def strategy(**changes: Any) -> FedTGP:
    return server_of("fedtgp", "abcde", feature_dim=16, **{f"fedtgp__{key}": value for key, value in changes.items()})


def uploads() -> list[Upload]:
    """Three clients with classes {0, 1, 3}, {1, 3} and {3}; nobody holds 2 or 4."""
    generator = torch.Generator().manual_seed(2)
    centres = torch.randn(5, 16, generator=generator)
    held = [torch.tensor(labels) for labels in ([0, 1, 3], [1, 3], [3])]
    sets = [Prototypes(centres[one] + 0.3 * torch.randn(len(one), 16, generator=generator), one) for one in held]
    return [Upload(f"site-{i}", Payload(prototypes=one), Report(1, 10, 5)) for i, one in enumerate(sets)]


def test_margins_by_hand() -> None:
    centres = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    # distances: 5 between the first two, 1 between first and third, √18 between second and third
    for kind, largest in (("adaptive", 5.0), ("nearest", math.sqrt(18))):
        assert strategy(margin=kind).margin(centres, torch.arange(3)) == pytest.approx(largest)
        for few in (0, 1):
            assert strategy(margin=kind).margin(centres[:few], torch.arange(few)) == 0.0


def test_margin_kinds_and_threshold() -> None:
    samples, labels = torch.tensor([[0.0, 0, 0, 0], [2.0, 0, 0, 0], [7.0, 0, 0, 0]]), torch.tensor([0, 0, 1])
    assert strategy().margin(samples, labels) == pytest.approx(6.0)  # the centre of class 0 is 1
    assert strategy(margin_threshold=2.5).margin(samples, labels) == 2.5
    assert strategy(margin="fixed", margin_threshold=9.0).margin(samples, labels) == 9.0
    assert strategy(margin="none").margin(samples, labels) == 0.0


def test_classes_nobody_holds_are_not_sent_and_not_trained_and_one_not_sent_later_stays_known() -> None:
    server = strategy(server_epochs=2)
    assert server.payload_down().vectors() is None
    before = server.vectors_CD.detach().clone()
    server.merge(uploads())
    changed = (server.vectors_CD.detach() != before).any(dim=1)
    assert changed.tolist() == [True, True, False, True, False]
    server.merge(uploads()[1:])
    found = server.payload_down().vectors()
    assert found.labels.tolist() == [0, 1, 3]


def test_training_parts_the_classes() -> None:
    """The claim of the paper's Figure 1: the trained prototypes lie further apart than the clients' means."""
    server = strategy(server_epochs=300, server_lr=0.1)
    untrained = strategy(server_epochs=1, server_lr=0.1).merge(uploads())["server-loss"]
    assert server.merge(uploads())["server-loss"] < untrained / 2
    found = server.prototypes
    apart = torch.cdist(found.means, found.means).fill_diagonal_(math.inf).min()
    sent = Prototypes.joined([upload.payload.vectors() for upload in uploads()])
    samples, labels = sent.means, sent.labels
    centres = torch.stack([samples[labels == c].mean(0) for c in (0, 1, 3)])
    assert apart > torch.cdist(centres, centres).fill_diagonal_(math.inf).min()
