"""Names of architectures and groups."""

from protofl_common.config.architectures import (
    ARCHITECTURES,
    BODIES,
    GROUPS,
    architecture_of,
    body_and_hidden,
    members_of,
)
from protofl_common.models.vectors import SIGNAL, TABLE, TEXT
from protofl_common.models.vision import VISION


def test_every_architecture_is_a_body_and_a_head_that_is_built_somewhere() -> None:
    assert sorted([*VISION, *TABLE, *SIGNAL, *TEXT]) == sorted(BODIES)
    assert {body_and_hidden(arch)[0] for arch in ARCHITECTURES} == set(BODIES)
    assert {body_and_hidden(arch)[1] for arch in ARCHITECTURES} == {0, 128, 256, 512}
    assert body_and_hidden("resnet34-imagenet-stem+fc256") == ("resnet34-imagenet-stem", 256)
    assert ARCHITECTURES["googlenet+fc512"] == "googlenet, head: fc 512, C"


def test_groups_name_known_architectures_each_of_which_is_a_group_of_one() -> None:
    assert all(archs and set(archs) <= set(ARCHITECTURES) for archs in GROUPS.values())
    assert [arch for arch in ARCHITECTURES if GROUPS[arch] != (arch,)] == []


def test_clients_get_the_architectures_in_turn() -> None:
    assert [architecture_of("htcnn8", i) for i in (0, 7, 8, 19)] == ["htcnn-1", "htcnn-8", "htcnn-1", "htcnn-4"]
    assert architecture_of("cnn4", 5) == "cnn4"
    assert members_of("cnn4, mynets:TinyViT,table3") == ("cnn4", "mynets:TinyViT", "mlp-1", "mlp-2", "mlp-3")
    assert [architecture_of("cnn4,mynets:TinyViT", i) for i in range(3)] == ["cnn4", "mynets:TinyViT", "cnn4"]


def test_feature_extractors_of_fedtgp() -> None:
    """In the order in which the paper lists them."""
    small = ("cnn4", "googlenet", "mobilenet-v2")
    assert GROUPS["htfe2"] == ("cnn4", *resnets(18))
    assert GROUPS["htfe3"] == resnets(10, 18, 34)
    assert GROUPS["htfe4"] == (*small, *resnets(18))
    assert GROUPS["htfe8"] == (*small, *resnets(18, 34, 50, 101, 152))
    assert GROUPS["htfe9"] == resnets(4, 6, 8, 10, 18, 34, 50, 101, 152)


def test_classifiers_of_fedtgp_are_dealt_out_independently_of_bodies() -> None:
    heads = [0, 512, 256, 128]
    assert [body_and_hidden(arch) for arch in GROUPS["res34-htc4"]] == [(*resnets(34), hidden) for hidden in heads]
    for client in range(16):
        body, hidden = body_and_hidden(architecture_of("htfe8-htc4", client))
        assert (body, hidden) == (GROUPS["htfe8"][client % 8], heads[client % 4])


def resnets(*layers: int) -> tuple[str, ...]:
    return tuple(f"resnet{n}-imagenet-stem" for n in layers)
