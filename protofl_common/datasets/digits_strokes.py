"""The strokes of ``digit-domains``: digits without colour, from scanned ones and from fonts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 28
"""Pixels a side."""
PRINTED_FONTS = (
    "DejaVuSans",
    "DejaVuSans-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "STIXGeneral",
    "STIXGeneralBolIta",
    "cmr10",
    "cmtt10",
)
COLOURED_FONTS = (
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSerif-Bold",
    "DejaVuSerif-BoldItalic",
    "DejaVuSansMono-Oblique",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmb10",
    "cmss10",
    "cmti10",
)
"""Files of matplotlib; no font serves two domains."""

Ink = NDArray[np.float32]
"""float32 [28, 28] in [0, 1]: 0 paper, 1 ink."""
Pencil = Callable[[int, np.random.Generator], Ink]
"""Draws one digit, another one at each call."""


def pencils(scans: dict[str, int], rng: np.random.Generator) -> dict[str, Pencil]:
    """A pencil for each domain; ``scans`` says how many scanned digits of each class go to which domain."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    stacks = [iter(rng.permutation(np.flatnonzero(digits.target == digit))) for digit in range(10)]
    own: dict[str, list[Iterator[Ink]]] = {
        name: [iter([digits.images[next(stack)] / 16 for _ in range(count)]) for stack in stacks]
        for name, count in scans.items()
    }

    def scanned(name: str) -> Pencil:
        return lambda digit, rng: _scanned(next(own[name][digit]), rng)

    def scanned_or_printed(digit: int, rng: np.random.Generator) -> Ink:
        scan = next(own["coloured"][digit], None)
        return _printed(digit, COLOURED_FONTS, rng) if scan is None else _scanned(scan, rng)

    return {
        "scanned": scanned("scanned"),
        "printed": lambda digit, rng: _printed(digit, PRINTED_FONTS, rng),
        "photo": scanned("photo"),
        "inverted": scanned("inverted"),
        "coloured": scanned_or_printed,
    }


def _scanned(scan: Ink, rng: np.random.Generator) -> Ink:
    """A scanned digit [8, 8] enlarged to about 24 pixels, a little turned and shifted."""
    from PIL import Image

    side = int(rng.integers(22, 27))
    large = Image.fromarray(np.rint(scan * 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    canvas = Image.new("L", (SIDE, SIDE))
    canvas.paste(large, ((SIDE - side) // 2, (SIDE - side) // 2))
    return _jittered(canvas, rng)


def _printed(digit: int, fonts: tuple[str, ...], rng: np.random.Generator) -> Ink:
    """A digit set in one of ``fonts`` at 19 to 26 pixels, a little turned and shifted."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    name = fonts[rng.integers(len(fonts))]
    file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
    font = ImageFont.truetype(str(file), int(rng.integers(19, 27)))
    canvas = Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(canvas).text((SIDE / 2, SIDE / 2), str(digit), fill=255, font=font, anchor="mm")
    return _jittered(canvas, rng)


def _jittered(canvas: Any, rng: np.random.Generator) -> Ink:
    from PIL import Image

    shift = tuple(int(step) for step in rng.integers(-2, 3, size=2))
    turned = canvas.rotate(float(rng.uniform(-12, 12)), Image.Resampling.BILINEAR, translate=shift)
    return np.asarray(turned, dtype=np.float32) / np.float32(255)
