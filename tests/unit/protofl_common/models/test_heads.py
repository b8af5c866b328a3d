"""Heads: the directions of a frozen last layer, and that it stays what it is."""

import pytest
import torch
from torch import nn

from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.models import fused_linear
from protofl_common.models.build import build_model, initial_model
from protofl_common.models.fused_linear import fused_linears
from protofl_common.models.split import (
    HiddenHead,
    LinearHead,
    class_directions,
    first_layer,
)
from tests.support.fakes import server_of


def build(arch, head, seed=0, head_seed=None, classes=10):
    sizes = {"input_shape": (1, 28, 28), "num_classes": classes, "feature_dim": 512}
    return build_model(arch, **sizes, seed=seed, head=head, head_seed=head_seed)


def head_alone(arch, head):
    """Return the head that a server trains; the input shape () stands for no body."""
    settings = Settings.from_run_config({**default_run_config(), "head": head, "feature-dim": 512})
    return initial_model(arch, (), 10, settings.model, 3, "global").head


def cosines(rows):
    """Return the cosines of all pairs of rows, which must have length 1."""
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    return (rows @ rows.T)[torch.triu(torch.ones(len(rows), len(rows), dtype=torch.bool), 1)]


@pytest.mark.parametrize(("classes", "width"), [(10, 512), (10, 10), (2, 3), (1, 4)])
def test_directions_are_orthogonal_where_there_is_room(classes, width):
    found = cosines(class_directions(classes, width))
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("classes", "width", "largest", "smallest"), [
    (3, 2, -1 / 2, -1 / 2),  # triangle
    (4, 3, -1 / 3, -1 / 3),  # tetrahedron
    (11, 10, -1 / 10, -1 / 10),  # simplex
    (5, 2, 0.309017, -0.809017),  # pentagon: cos 72°, cos 144°
    (6, 3, 0.0, -1.0),  # octahedron
    (12, 3, 0.447214, -1.0),  # icosahedron
    (3, 1, 1.0, -1.0),  # in one dimension two of three directions are equal
])  # fmt: skip
def test_directions_without_room_for_right_angles_are_spread_evenly(
    classes, width, largest, smallest
):
    """The largest and smallest cosines of all pairs are those of regular figures."""
    torch.manual_seed(0)
    found = cosines(class_directions(classes, width))

    assert found.max().item() == pytest.approx(largest, abs=1e-3)
    assert found.min().item() == pytest.approx(smallest, abs=1e-3)


def test_many_directions_are_far_better_spread_than_random_ones():
    torch.manual_seed(0)
    random = cosines(nn.functional.normalize(torch.randn(100, 50)))
    assert cosines(class_directions(100, 50)).max() < 0.12 < 0.4 < random.max()


def test_a_hidden_head_is_two_layers_with_relu_between():
    head, z = HiddenHead(5, 7, 3), torch.randn(4, 5)
    hidden = (z @ head.hidden.weight.T + head.hidden.bias).clamp_min(0)

    torch.testing.assert_close(head(z), hidden @ head.weight.T + head.bias)
    assert (head(z) < 0).any()


ARCHS = [
    "cnn4",
    "mnist-cnn",
    "htcnn-3",
    "resnet4-imagenet-stem",
    "googlenet+fc512",
    "mobilenet-v2+fc256",
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_frozen_head_stays_while_everything_else_trains(arch, momentum, monkeypatch):
    """The head stays under weight decay, and with steps inside backward (`fused_linears`).

    The optimizer knows the frozen parameters.
    """
    model = build(arch, "orthogonal-frozen")
    before = {name: value.clone() for name, value in model.named_parameters()}

    assert not before["head.bias"].any()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum, weight_decay=0.1)
    x = torch.rand(4, 1, 28, 28)
    y = torch.arange(4)
    monkeypatch.setattr(fused_linear, "MIN_WEIGHTS", 1)
    with fused_linears(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    still = {name for name, value in model.named_parameters() if torch.equal(value, before[name])}

    assert still == {"head.weight", "head.bias"}
    assert still == {name for name, value in model.named_parameters() if not value.requires_grad}


def test_a_frozen_head_changes_nothing_else():
    body = build("htcnn-2", "trainable").body
    body_of_frozen = build("htcnn-2", "orthogonal-frozen", head_seed=5).body
    for mine, other in zip(body.parameters(), body_of_frozen.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_frozen_head_takes_a_state_in_which_it_stays_frozen():
    model = build("cnn4", "orthogonal-frozen")
    other = build("cnn4", "orthogonal-frozen", seed=1)
    model.load_state_dict(other.state_dict())

    assert torch.equal(model.head.weight, other.head.weight)
    assert not model.head.weight.requires_grad


def test_clients_have_the_same_head_by_the_same_head_seed_whatever_their_bodies():
    """Without a head seed a client's own seed makes the head."""

    def weight(arch, seed, head_seed):
        return build(arch, "orthogonal-frozen", seed, head_seed).head.weight

    shared = weight("cnn4", seed=1, head_seed=7)
    assert torch.equal(weight("htcnn-2", seed=2, head_seed=7), shared)
    assert torch.equal(weight("googlenet+fc512", seed=3, head_seed=7), shared)
    assert not torch.equal(weight("cnn4", seed=1, head_seed=8), shared)

    own = weight("cnn4", seed=1, head_seed=None)
    assert torch.equal(weight("cnn4", seed=1, head_seed=None), own)
    assert not torch.equal(weight("cnn4", seed=2, head_seed=None), own)


@pytest.mark.parametrize("arch", ["cnn4", "resnet18-imagenet-stem+fc128"])
@pytest.mark.parametrize("head", ["trainable", "orthogonal-shared"])
def test_a_head_alone_is_like_that_of_a_whole_model(arch, head):
    """A server's head has the shapes of a client's; an orthogonal one has the same directions."""
    is_orthogonal = head == "orthogonal-shared"
    alone = head_alone(arch, head)

    kind = "orthogonal-frozen" if is_orthogonal else head
    of_whole_model = build(arch, kind, head_seed=derive_seed(3, "head")).head.state_dict()

    shapes = {name: value.shape for name, value in alone.state_dict().items()}
    assert shapes == {name: value.shape for name, value in of_whole_model.items()}
    assert torch.equal(alone.weight, of_whole_model["weight"]) == is_orthogonal
    assert torch.equal(alone.weight, head_alone(arch, head).weight)


def test_a_server_trains_its_head_without_dropout():
    assert not server_of("fedgh").head.training


def test_a_head_of_a_network_that_cannot_be_imported_here_can_be_built():
    assert head_alone("no_such_package:Net", "trainable").weight.shape == (10, 512)


@pytest.mark.parametrize("head", [LinearHead(3, 4), HiddenHead(3, 5, 4)])
def test_a_move_of_the_features_can_stand_in_the_bias_of_the_first_layer(head):
    """The model that a client of FedDBE leaves has its features moved in this way."""
    torch.manual_seed(0)
    features_BD = torch.randn(6, 3)
    move_D = torch.randn(3)
    wanted = head(features_BD + move_D)

    layer = first_layer(head)
    with torch.no_grad():
        layer.bias += layer.weight @ move_D

    torch.testing.assert_close(head(features_BD), wanted)
