"""By hand: what a server remembers of what a round lacks, who teaches whom, FedTGP's margins.

And on how many threads it trains.
"""

import math

import pytest
import torch
from torch import nn

from protofl_common.algorithms.base import ServerTrainingHparams
from protofl_common.maths.prototypes import Prototypes
from server_app.learning.training import train
from tests.support.fakes import server_of, upload

EAST = [1.0, 0.0]
NORTH = [0.0, 1.0]


def vectors_of(rows):
    """Return a vector of each class, each of one sample."""
    labels = torch.tensor(list(rows))
    means = torch.tensor(list(rows.values()), dtype=torch.float32)
    return Prototypes(means, labels, torch.ones_like(labels))


def sends(site, rows, **more):
    return upload(site, prototypes=vectors_of(rows), **more)


def says(site, rows):
    """Return a site's upload of its mean outputs for each class (FedDistill)."""
    return upload(site, outputs=vectors_of(rows))


def by_class(vectors):
    return dict(zip(vectors.labels.tolist(), vectors.means.tolist(), strict=True))


def test_fedpcl_hands_on_the_last_set_of_a_client_that_was_not_asked():
    """Site-0 is not asked in the second round; class 0, which it alone has, stays."""
    server = server_of("fedpcl")
    first = sends("site-0", {0: EAST})
    second = sends("site-1", {1: [0.0, 3.0]})
    server.merge([first, sends("site-1", {1: NORTH})])
    server.merge([second])

    down = server.payload_down()

    assert by_class(down.vectors()) == {0: EAST, 1: [0.0, 3.0]}
    of_site_0, of_site_1 = down.sets("local_sets")
    assert by_class(of_site_0) == {0: EAST}
    assert by_class(of_site_1) == {1: [0.0, 3.0]}


def test_fedplvm_keeps_the_prototypes_of_a_class_that_nobody_sent():
    """The second round has new prototypes of class 1 only."""
    server = server_of("fedplvm")
    weights = server.weights

    server.merge([sends("site-0", {0: EAST, 1: EAST}, weights=weights)])
    server.merge([sends("site-0", {1: NORTH}, weights=weights)])

    assert by_class(server.prototypes) == {0: EAST, 1: NORTH}


def test_fedsas_anchor_of_a_class_that_nobody_sent_stays_where_it_is():
    """The anchor of the class that was sent moves half of the way to its prototype (0, 8)."""
    server = server_of("fedsa", fedsa__smoothing=0.5)
    server.merge([sends("site-0", {0: EAST, 1: NORTH})])
    stays, moves = server.anchors_CD.clone()

    server.merge([sends("site-0", {1: [0.0, 8.0]})])

    assert server.anchors_CD[0].equal(stays)
    assert server.anchors_CD[1].equal(moves / 2 + torch.tensor([0.0, 4.0]))


def teacher(server, site):
    """Return the outputs by class that the site is to learn from; None if there are none."""
    outputs = server.payload_for(site, server.payload_down()).vectors("outputs")
    return None if outputs is None else by_class(outputs)


def test_by_probabilities_the_other_sites_teach():
    """A site learns from the mean of a class over all others, whether they were asked or not."""
    server = server_of("feddistill", feddistill__outputs="probabilities")
    assert teacher(server, "site-0") is None

    mixed = [0.25, 0.75]
    half = [0.5, 0.5]
    server.merge([says("site-0", {0: EAST, 1: mixed})])
    assert teacher(server, "site-0") is None, "nobody else has sent anything"

    server.merge([says("site-1", {0: half}), says("site-2", {0: NORTH})])
    assert teacher(server, "site-0") == {0: mixed}, "class 1 is its own alone"
    of_site_1 = {0: half, 1: mixed}
    assert teacher(server, "site-1") == of_site_1, "site-0 was not asked, and still teaches"
    assert teacher(server, "new") == {0: pytest.approx(half), 1: mixed}

    restored = server_of("feddistill", feddistill__outputs="probabilities")
    restored.restore(server.present_state())
    assert teacher(restored, "site-1") == of_site_1


def fedtgp(**changes):
    """FedTGP's server of five classes, with these settings of its own."""
    settings = {f"fedtgp__{key}": value for key, value in changes.items()}
    return server_of("fedtgp", "abcde", feature_dim=16, **settings)


@pytest.mark.parametrize(("kind", "margin"), [("adaptive", 5.0), ("nearest", math.sqrt(18))])
def test_fedtgps_margin_of_three_classes_by_hand(kind, margin):
    """The distances are 5 from class 0 to class 1, 1 from 0 to 2, and √18 from 1 to 2.

    An adaptive margin is the largest distance; a nearest one the largest of the distances to the
    nearest class. Fewer than two classes have none.
    """
    centres = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])

    server = fedtgp(margin=kind)

    assert server.margin(centres, torch.arange(3)) == pytest.approx(margin)
    for few in (0, 1):
        assert server.margin(centres[:few], torch.arange(few)) == 0.0


def test_fedtgps_margin_has_an_upper_bound_or_is_fixed_or_none():
    """Class 0 has its centre at 1, class 1 at 7."""
    samples = torch.tensor([[0.0], [2.0], [7.0]])
    labels = torch.tensor([0, 0, 1])

    def margin(**settings):
        return fedtgp(**settings).margin(samples, labels)

    assert margin() == 6.0
    assert margin(margin_threshold=2.5) == 2.5
    assert margin(margin="fixed", margin_threshold=9.0) == 9.0
    assert margin(margin="none") == 0.0


def test_fedtgps_classes_nobody_holds_are_not_trained_and_one_not_sent_later_stays_known():
    """Nobody holds classes 2 and 4; class 0 is site-0's, which the second round does not ask."""
    server = fedtgp(server_epochs=2)
    assert server.payload_down().vectors() is None

    before = server.vectors_CD.detach().clone()
    sent = []
    for i, classes in enumerate([(0, 1, 3), (1, 3), (3,)]):
        sent.append(sends(f"site-{i}", {c: [c, i] * 8 for c in classes}))  # 16 features
    server.merge(sent)
    is_changed_C = (server.vectors_CD.detach() != before).any(dim=1)
    assert is_changed_C.nonzero().flatten().tolist() == [0, 1, 3]

    _of_site_0, *others = sent
    server.merge(others)
    assert server.payload_down().vectors().labels.tolist() == [0, 1, 3]


def test_the_loss_of_fedtgps_server_falls():
    """After 300 epochs the loss is less than half of what it is after one."""
    torch.manual_seed(2)
    centres_CD = torch.randn(5, 16)
    sent = []
    for i in range(3):
        means_CD = centres_CD + 0.3 * torch.randn(5, 16)
        rows = dict(enumerate(means_CD.tolist()))
        sent.append(sends(f"site-{i}", rows))

    first = fedtgp(server_epochs=1, server_lr=0.1).merge(sent)["server-loss"]
    last = fedtgp(server_epochs=300, server_lr=0.1).merge(sent)["server-loss"]

    assert last < first / 2


@pytest.fixture
def four_threads():
    """Let PyTorch use four threads during a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    # 2^24 multiplications are worth threads: rows · dim · dim
    ("dim", "batch", "forward_rows", "threads"),
    [
        pytest.param(512, 10, 10, 1, id="ten classes"),
        pytest.param(512, 10, 100, 4, id="a hundred classes"),
        pytest.param(512, 10, 0, 1, id="the minibatch itself"),
        pytest.param(512, 0, 0, 4, id="all at once"),
        pytest.param(8, 0, 0, 1, id="all at once, narrow"),
    ],
)
@pytest.mark.usefixtures("four_threads")
def test_a_small_step_takes_one_thread(dim, batch, forward_rows, threads):
    """In a small step threads cost more than they save. Afterwards there are four again.

    ``batch``: rows of a minibatch, 0 for all 100; ``forward_rows``: rows that pass through the
    layer, 0 for those of the minibatch.
    """
    layer = nn.Linear(dim, dim)
    threads_in_steps = set()

    def loss(rows):
        threads_in_steps.add(torch.get_num_threads())
        return layer(rows).square().mean()

    hparams = ServerTrainingHparams(server_epochs=1, server_lr=0.1, server_batch_size=batch)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rows = [torch.randn(100, dim)]
    train(loss, rows, optimizer, hparams, torch.Generator(), forward_rows=forward_rows)

    assert threads_in_steps == {threads}
    assert torch.get_num_threads() == 4
