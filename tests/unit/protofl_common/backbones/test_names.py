"""Reading the setting's value."""

import pytest

from protofl_common.config.backbones import BackboneName, parse_backbones, parse_name


def test_lists_keep_their_order_and_lose_spaces():
    assert parse_backbones("scenes, glyphs ,torchvision:resnet18") == (
        "scenes",
        "glyphs",
        "torchvision:resnet18",
    )


@pytest.mark.parametrize(("name", "parts"), [
    ("glyphs", BackboneName("embedded", "glyphs")),
    ("package:efficientnet-lite0", BackboneName("package", "efficientnet-lite0")),
    ("package:efficientnet-lite0@96", BackboneName("package", "efficientnet-lite0", 96)),
    ("torchvision:vit_b_16", BackboneName("torchvision", "vit_b_16")),
    ("torchvision:resnet18@64", BackboneName("torchvision", "resnet18", 64)),
    (
        "timm:vit_tiny_patch16_224.augreg_in21k",
        BackboneName("timm", "vit_tiny_patch16_224.augreg_in21k"),
    ),
    ("timm:resnet10t.c3_in1k@96", BackboneName("timm", "resnet10t.c3_in1k", 96)),
    ("file:small:/data/own.json", BackboneName("file", "small", 0, "/data/own.json")),
    ("file:resnet18@84:rel/x@2.pth", BackboneName("file", "resnet18", 84, "rel/x@2.pth")),
    (r"file:alexnet:C:\nets\a.pth", BackboneName("file", "alexnet", 0, r"C:\nets\a.pth")),
])  # fmt: skip
def test_names_in_parts(name, parts):
    assert parse_name(name) == parts


@pytest.mark.parametrize(
    "name",
    [
        "",
        "resnet18",
        "Glyphs",
        "glyphs@32",
        "timm:",
        "file:resnet18",
        "file:/x.pth",
        "hub:x",
        "package:os",
    ],
)
def test_unknown_names_are_refused(name):
    said = f"{name!r} is not one of glyphs, fractals, scenes, package:efficientnet-lite0,"
    with pytest.raises(ValueError, match=said):
        parse_backbones(name)


@pytest.mark.parametrize(("value", "words"), [
    ("glyphs,,scenes", "backbone '' is not one of"),
    ("glyphs,scenes,glyphs", "'glyphs' is named twice"),
    ("torchvision:resnet18@4", "size 4 is not between 8 and 1024"),
    ("file:resnet18@9999:/x.pth", "size 9999 is not between"),
])  # fmt: skip
def test_impossible_lists_are_refused(value, words):
    with pytest.raises(ValueError, match=words):
        parse_backbones(value)
