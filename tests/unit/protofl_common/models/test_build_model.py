"""Every architecture: names, groups, shapes, a training step, seeds, padding, what is refused."""

import pytest
import torch
from torch import Tensor, nn

from protofl_common.config import architectures as net
from protofl_common.config.options import SettingsError
from protofl_common.models.bodies import CNN_PLANS, SIGNAL, TABLE, TEXT, VISION
from protofl_common.models.build import build_model, check_model, copied
from tests.support.models import CLASSES, DIM, assert_it_learns, build

SMALL = [*CNN_PLANS, *TABLE]
LARGER = [arch for arch in net.ARCHITECTURES if arch not in (*SMALL, *SIGNAL, *TEXT)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def assert_shapes(arch, channels, size, built_for):
    """Check the shapes of features and logits of two images of ``size`` pixels a side.

    The network, built for images of ``built_for`` pixels, has shapes only (PyTorch's meta device).
    """
    with torch.device("meta"), torch.no_grad():
        model = build(arch, channels, built_for).eval()
        z = model.body(torch.empty(2, channels, size, size))
        assert z.shape == (2, DIM)
        assert model.head(z).shape == (2, CLASSES)


@pytest.mark.parametrize("arch", SMALL)
@pytest.mark.parametrize("size", [8, 16, 28, 32, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_shapes_of_small_networks(arch, size, channels):
    assert_shapes(arch, channels, size, built_for=size)


SOME = ["resnet4-imagenet-stem", "resnet10", "resnet10-imagenet-stem", "resnet18-stride-1-4"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*SOME, "resnet50-imagenet-stem", "googlenet", "mobilenet-v2"])
def test_shapes_of_larger_networks(arch):
    """What is built for 28 pixels a side takes 64; GoogLeNet must be built for the smallest."""
    small = range(8, 18) if arch == "googlenet" else (8,)
    assert_shapes(arch, 1, 64, built_for=28)
    for size in (28, *small):
        assert_shapes(arch, 1, size, built_for=size)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SMALL)
@pytest.mark.parametrize("size", [8, 28])
def test_small_networks_learn(arch, size):
    assert_it_learns(build(arch, size=size), torch.rand(20, 1, size, size), lr=0.02, steps=4)


@pytest.mark.long
@pytest.mark.parametrize("arch", LARGER)
def test_larger_networks_learn(arch):
    """On images as small as CIFAR's: the last map is a single pixel."""
    model = build(arch, channels=3, size=32, dim=128)
    assert_it_learns(model, torch.rand(4, 3, 32, 32), lr=0.1, steps=1)


HIDDEN_HEADS = net.HTC4[1:]  # of the four heads the first has no hidden layer
HEADS = [*CNN_PLANS, *SOME[:2], "googlenet", "mobilenet-v2"]
HEADS += [arch for arch in LARGER if arch.endswith(HIDDEN_HEADS)]


@pytest.mark.parametrize("arch", HEADS)
def test_heads_have_named_parts_and_those_without_a_hidden_layer_can_be_exchanged(arch):
    with torch.device("meta"):
        weights = build(arch).head.state_dict()
    shapes = {"weight": (CLASSES, DIM), "bias": (CLASSES,)}
    _, _, width = arch.partition("+fc")
    if width:
        hidden = int(width)
        shapes["weight"] = (CLASSES, hidden)
        shapes |= {"hidden.weight": (hidden, DIM), "hidden.bias": (hidden,)}

    assert {name: tuple(value.shape) for name, value in weights.items()} == shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["mnist-cnn", "htcnn-4", net.PROJECTION, *SOME[:2], "googlenet", "mobilenet-v2+fc256"]
)
def test_weights_follow_from_the_seed_alone(arch):
    """Building a model does not read PyTorch's random state, and leaves it as it is."""

    def weights(seed):
        return list(build(arch, seed=seed).state_dict().values())

    first = weights(1)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = weights(1)
    of_another_seed = weights(2)

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, of_another_seed, strict=True))


@pytest.mark.parametrize("arch", net.ARCHITECTURES)
def test_a_copy_shares_no_part_with_its_original(arch):
    """Not even a part that no list of parameters, buffers or modules has.

    Such a part would go from client to client.
    """
    shape = (1, 28, 28)
    if arch in SIGNAL:
        shape = (3, 32)
    elif arch in TEXT:
        shape = (20,)
    with torch.device("meta"):
        original = build_model(
            arch, input_shape=shape, num_classes=CLASSES, feature_dim=DIM, seed=0
        )

    twin = copied(original)

    assert str(twin) == str(original)
    for mine, other in zip(twin.modules(), original.modules(), strict=True):
        assert mine is not other
        for name, value in vars(mine).items():
            assert not isinstance(value, Tensor | nn.Module), name
            if isinstance(value, dict):
                assert value is not vars(other)[name], name
    for weight, its_original in zip(twin.parameters(), original.parameters(), strict=True):
        assert weight is not its_original
        assert weight.requires_grad == its_original.requires_grad
    for buffer, its_original in zip(twin.buffers(), original.buffers(), strict=True):
        assert buffer is not its_original


@pytest.mark.parametrize(("change", "words"), [
    ({"arch": "vgg"}, "arch is 'vgg', not one of mnist-cnn"),
    ({"arch": "cnn4+fc512"}, "arch is 'cnn4\\+fc512', not one of"),
    ({"input_shape": (1, 7, 7)}, r"at least 8 pixels a side .*\[1, 7, 7\]"),
    ({"input_shape": (1, 28, 32)}, r"square images .*\[1, 28, 32\]"),
    ({"input_shape": (30,)}, r"'cnn4' is for square images .*\[30\]"),
    (
        {"input_shape": (3, 512, 512), "feature_dim": 16384},
        "'cnn4': 16,384,.* above .* and feature-dim = 16384;",
    ),
    ({"input_shape": (4, 20)}, r"'cnn4' is for square images.*\[4, 20\].*signal3"),
    (
        {"arch": "signal-cnn", "input_shape": (30,)},
        r"'signal-cnn' is for signals \[channels, steps\].*\[30\].*table3",
    ),
    (
        {"arch": "text-gru", "input_shape": (3, 28, 28)},
        r"'text-gru' is for texts \[tokens\].*small3",
    ),
])  # fmt: skip
def test_impossible_models_are_refused(change, words):
    possible = {"arch": "cnn4", "input_shape": (1, 28, 28), "feature_dim": 8}
    with pytest.raises(ValueError, match=words):
        build_model(**{**possible, **change}, num_classes=10, seed=0)


WIDTH = 6
SHAPES = {"table3": (13,), "signal3": (4, 20), "text3": (9,)}
CASES = [(arch, shape) for group, shape in SHAPES.items() for arch in net.GROUPS[group]]


def of_vectors(arch, shape):
    """Build a network for samples of this shape, which are no images."""
    return build_model(arch, input_shape=shape, num_classes=3, feature_dim=WIDTH, seed=1)


def samples(arch, shape, count):
    generator = torch.Generator().manual_seed(0)
    if arch.startswith("text"):
        return torch.randint(1, net.VOCABULARY, (count, *shape), generator=generator)
    return torch.randn(count, *shape, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shape"), CASES)
def test_networks_for_tables_signals_and_texts_learn_and_every_weight_moves(arch, shape):
    model = of_vectors(arch, shape)
    x = samples(arch, shape, 12)

    assert model.body(x).shape == (12, WIDTH)
    assert_it_learns(model, x, lr=0.05, steps=10)


@pytest.mark.parametrize("arch", net.GROUPS["text3"])
def test_texts_of_any_length_and_tokens_of_any_size_serve(arch):
    """Tokens beyond the vocabulary count modulo its size; 0 is padding, and stays apart."""
    body = of_vectors(arch, (9,)).body.eval()
    short = torch.tensor([[5, 7, 0, 0]])
    beyond = net.VOCABULARY - 1
    large = torch.tensor([[5 + beyond, 7 + beyond, 0, 0]])

    assert body(short).shape == (1, WIDTH)
    assert torch.equal(body(short), body(large))


def test_padding_changes_no_mean():
    body = of_vectors("text-bag", (9,)).body.eval()
    two_words = torch.tensor([[5, 7]])
    padded = torch.tensor([[5, 7, 0, 0, 0]])
    no_words = torch.zeros(1, 4, dtype=torch.int64)

    torch.testing.assert_close(body(two_words), body(padded))
    assert torch.isfinite(body(no_words)).all()


def test_inputs_of_another_type_are_refused():
    """A network for texts is given numbers, and one for numbers is given tokens."""
    numbers = torch.rand(2, 9)
    said = r"arch = 'text-bag': inputs float32 \[2, 9\] do not fit .*text3 for texts"

    with pytest.raises(SettingsError, match=said):
        check_model(of_vectors("text-bag", (9,)), "text-bag", numbers, WIDTH)

    tokens = torch.ones(2, 9, dtype=torch.int64)
    said = r"arch = 'mlp-1': inputs int64 \[2, 9\] do not fit .*floating point$"

    with pytest.raises(SettingsError, match=said):
        check_model(of_vectors("mlp-1", (9,)), "mlp-1", tokens, WIDTH)


def test_every_architecture_is_a_known_body_with_or_without_a_hidden_layer_in_its_head():
    assert sorted([*VISION, *TABLE, *SIGNAL, *TEXT]) == sorted(net.BODIES)
    bodies = set()
    widths = set()  # of the hidden layer; 0: there is none
    for arch in net.ARCHITECTURES:
        body, width = net.body_and_hidden(arch)
        bodies.add(body)
        widths.add(width)
    assert bodies == set(net.BODIES)
    assert widths == {0, 128, 256, 512}
    assert net.body_and_hidden("resnet34-imagenet-stem+fc256") == ("resnet34-imagenet-stem", 256)
    assert net.ARCHITECTURES["googlenet+fc512"] == "googlenet, head: fc 512, C"


def test_groups_name_known_architectures_each_of_which_is_a_group_of_one():
    assert all(archs and set(archs) <= set(net.ARCHITECTURES) for archs in net.GROUPS.values())
    assert [arch for arch in net.ARCHITECTURES if net.GROUPS[arch] != (arch,)] == []


def test_clients_get_the_architectures_in_turn():
    for client, arch in ((0, "htcnn-1"), (7, "htcnn-8"), (8, "htcnn-1"), (19, "htcnn-4")):
        assert net.architecture_of("htcnn8", client) == arch
    assert net.architecture_of("cnn4", 5) == "cnn4"

    listed = [net.architecture_of("cnn4,mynets:TinyViT", client) for client in range(3)]
    assert listed == ["cnn4", "mynets:TinyViT", "cnn4"]


def test_a_list_of_architectures_may_name_groups():
    members = net.members_of("cnn4, mynets:TinyViT,table3")
    assert members == ("cnn4", "mynets:TinyViT", "mlp-1", "mlp-2", "mlp-3")


def test_feature_extractors_of_fedtgp():
    """They stand in the order in which the paper lists them."""
    small = ("cnn4", "googlenet", "mobilenet-v2")
    assert net.GROUPS["htfe2"] == ("cnn4", *resnets(18))
    assert net.GROUPS["htfe3"] == resnets(10, 18, 34)
    assert net.GROUPS["htfe4"] == (*small, *resnets(18))
    assert net.GROUPS["htfe8"] == (*small, *resnets(18, 34, 50, 101, 152))
    assert net.GROUPS["htfe9"] == resnets(4, 6, 8, 10, 18, 34, 50, 101, 152)


def test_classifiers_of_fedtgp_are_dealt_out_independently_of_bodies():
    """Bodies repeat after eight clients, and heads after four."""
    heads = [0, 512, 256, 128]
    res34 = "resnet34-imagenet-stem"
    dealt = [net.body_and_hidden(arch) for arch in net.GROUPS["res34-htc4"]]

    assert dealt == [(res34, hidden) for hidden in heads]

    for client in range(16):
        body, hidden = net.body_and_hidden(net.architecture_of("htfe8-htc4", client))
        assert body == net.GROUPS["htfe8"][client % 8]
        assert hidden == heads[client % 4]


def resnets(*layers):
    return tuple(f"resnet{n}-imagenet-stem" for n in layers)
