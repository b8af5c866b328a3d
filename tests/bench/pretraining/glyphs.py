"""``glyphs``: letters and symbols of matplotlib's fonts, without digits.

A class is a character that `FONTS` of the fonts have. Left out are digits, all that contains one (², ½, ①) or stands
for a number (Ⅷ), accented letters, and characters that look like a digit or like an earlier character when enlarged
to the same size (O and 0, s and S, Latin and Cyrillic A).
"""

import unicodedata
from collections import Counter
from functools import lru_cache
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.bench.pretraining.corpus import SIDE, Corpus, Pixels

UNICODE_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold",
                 "DejaVuSerif-Italic", "DejaVuSansMono", "DejaVuSansMono-Bold", "STIXGeneral", "STIXGeneralItalic",
                 "STIXGeneralBol", "STIXGeneralBolIta")  # fmt: skip
ASCII_FONTS = ("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10")
"""Their codes above ASCII are their own."""
FONTS = 10
FIRST_CODE, LAST_CODE = 0x21, 0x2BFF
LARGE = 96
"""Pixels at which glyphs are set, to be scaled down."""
NUMBER_WORDS = ("DIGIT", "NUMBER", "TONE", "TYPE-")
"""In the names of characters that show digits."""
ALIKE = 0.92
"""Correlation of two 20×20 pictures from which on they count as one class."""


def corpus() -> Corpus:
    return Corpus(draw, (len(characters()),), per_class=40, flips=False)


def draw(label: int, rng: np.random.Generator) -> tuple[Pixels, tuple[int, ...]]:
    """White strokes on black: colours, warps and noise are left to the augmentation."""
    from PIL import Image

    character = characters()[label]
    fonts = [name for name in (*UNICODE_FONTS, *ASCII_FONTS) if character in _repertoire(name)]
    glyph = Image.fromarray(_glyph(character, fonts[rng.integers(len(fonts))]))
    longest = float(rng.uniform(36, 56))
    scale = longest / max(glyph.size)
    stretch = np.exp(rng.uniform(-0.2, 0.2, size=2))
    size = [int(np.clip(side * scale * by, 2, SIDE)) for side, by in zip(glyph.size, stretch, strict=True)]
    glyph = glyph.resize((size[0], size[1]), Image.Resampling.BILINEAR, reducing_gap=2)
    canvas = Image.new("L", (SIDE, SIDE))
    canvas.paste(glyph, ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2))
    ink = np.asarray(canvas, dtype=np.float32) / np.float32(255)
    return np.repeat(ink[..., None], 3, axis=2), ()


@lru_cache(maxsize=1)
def characters() -> tuple[str, ...]:
    fonts = Counter(character for name in UNICODE_FONTS for character in _repertoire(name))
    kept: list[str] = []
    pictures = [picture for digit in "0123456789" if (picture := _picture(digit)) is not None]
    for character in sorted(fonts):
        if fonts[character] < FONTS or not _wanted(character):
            continue
        picture = _picture(character)
        if picture is not None and (np.stack(pictures) @ picture).max() < ALIKE:
            kept.append(character)
            pictures.append(picture)
    return tuple(kept)


def _wanted(character: str) -> bool:
    if not FIRST_CODE <= ord(character) <= LAST_CODE or unicodedata.category(character)[0] not in "LSP":
        return False
    if len(unicodedata.normalize("NFKD", character)) > 1:
        return False
    name = unicodedata.name(character, "")
    return unicodedata.numeric(character, None) is None and not any(word in name for word in NUMBER_WORDS)


def _picture(character: str) -> NDArray[Any] | None:
    """float64 [400], centred and of length 1; None for a glyph that hardly has any shape."""
    from PIL import Image

    glyph = _glyph(character, next(name for name in UNICODE_FONTS if character in _repertoire(name)))
    if max(glyph.shape) < 24:
        return None
    small = np.asarray(Image.fromarray(glyph).resize((20, 20), Image.Resampling.BOX), dtype=np.float64).ravel()
    small -= small.mean()
    length = float(np.linalg.norm(small))
    return small / length if length > 1e-6 else None


@lru_cache(maxsize=8192)
def _glyph(character: str, font: str) -> NDArray[np.uint8]:
    """uint8 [height, width]: the glyph without margins."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (3 * LARGE, 3 * LARGE))
    ImageDraw.Draw(canvas).text((LARGE, LARGE), character, fill=255, font=_font(font))
    return np.asarray(canvas.crop(canvas.getbbox() or (0, 0, 1, 1)))


@lru_cache(maxsize=32)
def _font(name: str) -> Any:
    from PIL import ImageFont

    return ImageFont.truetype(str(_file(name)), LARGE)


@lru_cache(maxsize=32)
def _repertoire(name: str) -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    codes = FT2Font(str(_file(name))).get_charmap()
    characters = frozenset(map(chr, codes))
    return characters & frozenset(ascii_letters) if name in ASCII_FONTS else characters


def _file(name: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
