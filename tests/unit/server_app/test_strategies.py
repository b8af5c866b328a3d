"""By hand: what a server remembers of what a round lacks, who teaches whom, FedTGP's margins.

And on how many threads it trains.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofl_common.algorithms.base import ServerTrainingHparams
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.learning.training import train
from server_app.run.replies import Upload
from server_app.strategies.feddistill import FedDistill
from server_app.strategies.fedtgp import FedTGP
from tests.support.fakes import server_of


def upload(
    site: str, rows: dict[int, list[float]], entry: str = "prototypes", **more: Any
) -> Upload:
    """Of these vectors of classes, with a count of 1 each."""
    labels, means = torch.tensor(list(rows)), torch.tensor(list(rows.values()), dtype=torch.float32)
    vectors = Prototypes(means, labels, torch.ones_like(labels))
    return Upload(site, Payload(**{entry: vectors}, **more), Report(1, 10, 5))


def test_fedpcl_hands_on_the_last_set_of_a_client_that_was_not_asked() -> None:
    server = server_of("fedpcl")
    server.merge([upload("site-0", {0: [1.0, 0.0]}), upload("site-1", {1: [0.0, 1.0]})])
    server.merge([upload("site-1", {1: [0.0, 3.0]})])
    down = server.payload_down()

    assert down.vectors().means.tolist() == [[1.0, 0.0], [0.0, 3.0]], (
        "class 0, which nobody sent, stays"
    )

    first, second = down.sets("local_sets")
    assert first.means.tolist() == [[1.0, 0.0], [0.0, 3.0]], (
        "its own class 0, completed by the global class 1"
    )
    assert second.means.tolist() == [[1.0, 0.0], [0.0, 3.0]]


def test_fedplvm_keeps_the_prototypes_of_a_class_that_nobody_sent() -> None:
    server = server_of("fedplvm")
    weights = server.weights
    server.merge([upload("site-0", {0: [1.0, 0.0], 1: [0.0, 1.0]}, weights=weights)])
    server.merge([upload("site-0", {1: [0.0, 5.0]}, weights=weights)])
    kept = server.prototypes

    assert dict(zip(kept.labels.tolist(), kept.means.tolist(), strict=True)) == {
        0: [1.0, 0.0],
        1: [0.0, 5.0],
    }


def test_fedsas_anchor_of_a_class_that_nobody_sent_stays_where_it_is() -> None:
    server = server_of("fedsa", fedsa__smoothing=0.5)
    server.merge([upload("site-0", {0: [8.0, 0.0], 1: [0.0, 8.0]})])
    before = server.anchors_CD.clone()
    server.merge([upload("site-0", {1: [0.0, 8.0]})])

    assert server.anchors_CD[0].equal(before[0])
    assert server.anchors_CD[1].tolist() == [before[1, 0] / 2, before[1, 1] / 2 + 4]


def teacher(server: FedDistill, site: str) -> dict[int, list[float]] | None:
    sent = server.payload_for(site, server.payload_down()).vectors("outputs")
    return (
        None if sent is None else dict(zip(sent.labels.tolist(), sent.means.tolist(), strict=True))
    )


def test_the_others_teach_by_probabilities_and_all_by_logits() -> None:
    server = server_of("feddistill", feddistill__outputs="probabilities")
    assert teacher(server, "site-0") is None

    server.merge([upload("site-0", {0: [1.0, 0.0], 1: [0.25, 0.75]}, "outputs")])
    assert teacher(server, "site-0") is None, "nobody else has sent anything"

    server.merge(
        [upload("site-1", {0: [0.5, 0.5]}, "outputs"), upload("site-2", {0: [0.0, 1.0]}, "outputs")]
    )

    assert teacher(server, "site-0") == {0: [0.25, 0.75]}, "class 1 is its own alone"
    assert teacher(server, "site-1") == {0: [0.5, 0.5], 1: [0.25, 0.75]}, (
        "site-0 was not asked, and still teaches"
    )
    assert teacher(server, "new") == {0: [pytest.approx(0.5)] * 2, 1: [0.25, 0.75]}

    restored = server_of("feddistill", feddistill__outputs="probabilities")
    restored.restore(server.present_state())

    assert teacher(restored, "site-1") == teacher(server, "site-1")

    server = server_of("feddistill", feddistill__outputs="logits")
    sent = {"site-0": {0: [3.0, -1.0]}, "site-1": {0: [5.0, -3.0], 1: [0.0, 8.0]}}
    server.merge([upload(site, rows, "outputs") for site, rows in sent.items()])

    assert teacher(server, "site-0") == teacher(server, "site-1") == {0: [4.0, -2.0], 1: [0.0, 8.0]}


def fedtgp(**changes: Any) -> FedTGP:
    return server_of(
        "fedtgp",
        "abcde",
        feature_dim=16,
        **{f"fedtgp__{key}": value for key, value in changes.items()},
    )


def test_fedtgps_margins_by_hand() -> None:
    centres = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    # distances: 5 between the first two, 1 between first and third, √18 between second and third
    for kind, largest in (("adaptive", 5.0), ("nearest", math.sqrt(18))):
        assert fedtgp(margin=kind).margin(centres, torch.arange(3)) == pytest.approx(largest)
        for few in (0, 1):
            assert fedtgp(margin=kind).margin(centres[:few], torch.arange(few)) == 0.0

    samples, labels = (
        torch.tensor([[0.0, 0, 0, 0], [2.0, 0, 0, 0], [7.0, 0, 0, 0]]),
        torch.tensor([0, 0, 1]),
    )

    assert fedtgp().margin(samples, labels) == pytest.approx(6.0)  # the centre of class 0 is 1
    assert fedtgp(margin_threshold=2.5).margin(samples, labels) == 2.5
    assert fedtgp(margin="fixed", margin_threshold=9.0).margin(samples, labels) == 9.0
    assert fedtgp(margin="none").margin(samples, labels) == 0.0


def test_fedtgps_classes_nobody_holds_are_not_trained_and_one_not_sent_later_stays_known() -> None:
    server = fedtgp(server_epochs=2)
    assert server.payload_down().vectors() is None

    before = server.vectors_CD.detach().clone()
    sent = [
        upload(f"site-{i}", {c: [c, i] * 8 for c in held})
        for i, held in enumerate(((0, 1, 3), (1, 3), (3,)))
    ]
    server.merge(sent)

    assert (server.vectors_CD.detach() != before).any(dim=1).tolist() == [
        True,
        True,
        False,
        True,
        False,
    ]

    server.merge(sent[1:])
    assert server.payload_down().vectors().labels.tolist() == [0, 1, 3]


def test_the_loss_of_fedtgps_server_falls() -> None:
    torch.manual_seed(2)
    centres_CD = torch.randn(5, 16)
    around = [(centres_CD + 0.3 * torch.randn(5, 16)).tolist() for _ in range(3)]
    sent = [upload(f"site-{i}", dict(enumerate(means))) for i, means in enumerate(around)]
    first, last = (
        fedtgp(server_epochs=epochs, server_lr=0.1).merge(sent)["server-loss"]
        for epochs in (1, 300)
    )

    assert last < first / 2


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dim", "batch", "passed", "threads"),
    [
        pytest.param(512, 10, 10, 1, id="ten classes"),
        pytest.param(512, 10, 100, 4, id="a hundred classes"),
        pytest.param(512, 10, 0, 1, id="the minibatch itself"),
        pytest.param(512, 0, 0, 4, id="all at once"),
        pytest.param(8, 0, 0, 1, id="all at once, narrow"),
    ],
)
@pytest.mark.usefixtures("four_threads")
def test_a_small_step_takes_one_thread(dim: int, batch: int, passed: int, threads: int) -> None:
    layer = nn.Linear(dim, dim)
    seen = set()

    def loss(rows: Tensor) -> Tensor:
        seen.add(torch.get_num_threads())
        return layer(rows).square().mean()

    hparams = ServerTrainingHparams(server_epochs=1, server_lr=0.1, server_batch_size=batch)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    train(loss, [torch.randn(100, dim)], optimizer, hparams, torch.Generator(), forward_rows=passed)

    assert seen == {threads}
    assert torch.get_num_threads() == 4
