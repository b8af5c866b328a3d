"""The digit data sets that are drawn: ``digit-domains`` in five looks, and ``digit-mix`` beside MNIST and USPS.

Every domain of ``digit-domains`` has `PER_CLASS` images of each digit, 28×28 RGB. The strokes come from scikit-learn's
1,797 scanned digits, of which no two domains share one, or from matplotlib's fonts; the photographs are scikit-learn's
two. The images depend on the versions of these packages, not on the run's seed. ``digit-mix`` stands in for Digit-5
with looks like photographs behind the digit (MNIST-M), noise (SynthDigits), coloured numbers with neighbours (SVHN).
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.sections import DataSettings
from protofl_common.data.images import data_dir_of, read_image
from protofl_common.data.published import locate_public, read_public
from protofl_common.data.raw import DataError, Images, Ints, RawData, from_arrays, resized

PER_CLASS = 50
SEED = 20240229
SIDE = 28  # pixels a side
REAL, LOOKS = ("mnist", "usps"), ("photo", "inverted", "coloured")  # the domains of ``digit-mix``
REAL_PER_CLASS = 200  # images of each digit that ``digit-mix`` takes of a real set: the first ones of its training part
DIGIT5 = ("mnist", "mnist-m", "usps", "svhn")  # its domains but for SynthDigits, which cannot be had
MNIST_M = tuple(f"mnist_m/mnist_m_{name}" for name in ("train", "test", "train_labels.txt", "test_labels.txt"))
MOST_OF_DIGIT5 = 7500, 2000  # images of a domain for training and for testing, as in the first papers on it
PRINTED_FONTS = (
    "DejaVuSans DejaVuSans-BoldOblique DejaVuSerif DejaVuSerif-Italic DejaVuSansMono "
    "DejaVuSansMono-Bold STIXGeneral STIXGeneralBolIta cmr10 cmtt10"
)
COLOURED_FONTS = (
    "DejaVuSans-Bold DejaVuSans-Oblique DejaVuSerif-Bold DejaVuSerif-BoldItalic DejaVuSansMono-Oblique "
    "STIXGeneralBol STIXGeneralItalic cmb10 cmss10 cmti10"
)  # files of matplotlib; no font serves two domains

Ink = NDArray[np.float32]  # float32 [28, 28] in [0, 1]: 0 paper, 1 ink
Pixels = NDArray[np.floating[Any]]  # floating point [28, 28, 3] in [0, 1] (values outside are clipped at the end)


def read_domains(settings: DataSettings) -> RawData:
    """All domains of ``digit-domains``, in the order of `DOMAINS`; the settings change nothing."""
    from sklearn.datasets import load_digits

    rng, scans = np.random.default_rng(SEED), load_digits()
    stacks = [iter(rng.permutation(np.flatnonzero(scans.target == digit))) for digit in range(10)]
    images = []
    for look, scanned, fonts in DOMAINS.values():
        inks = [
            _scanned(scans.images[next(stacks[digit])] / 16, rng) if number < scanned else _printed(digit, fonts, rng)
            for number in range(PER_CLASS)
            for digit in range(10)
        ]
        pixels = np.stack([look(ink, inks, rng) for ink in inks])
        images.append(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8).transpose(0, 3, 1, 2))
    return _of_domains([(part, np.tile(np.arange(10), PER_CLASS)) for part in images], tuple(DOMAINS))


def locate_mix(settings: DataSettings) -> tuple[Path, ...]:
    """The files of MNIST and USPS, both in ``data-dir``."""
    return tuple(path for name in REAL for path in locate_public(name, settings))


def read_mix(settings: DataSettings) -> RawData:
    """All domains of ``digit-mix``, without an official test part."""
    parts, drawn = [], read_domains(settings)
    for name in REAL:
        data = read_public(name, settings)
        training = np.flatnonzero(data.official == 0)
        of_each = [training[data.labels[training] == digit][:REAL_PER_CLASS] for digit in range(10)]
        rows = np.sort(np.concatenate(of_each))
        parts.append((np.repeat(resized(data.inputs[rows], SIDE), 3, axis=1), data.labels[rows]))
    for look in LOOKS:
        rows = np.flatnonzero(drawn.domains == drawn.domain_names.index(look))
        parts.append((drawn.inputs[rows], drawn.labels[rows]))
    return _of_domains(parts, REAL + LOOKS)


def locate_digit5(settings: DataSettings) -> tuple[Path, ...]:
    """The files of the domains of Digit-5 that are in ``data-dir``; DataError for fewer than two domains."""
    if len(files := _digit5_files(settings)) < 2:
        wanted = f"two of {', '.join(DIGIT5)}: torchvision's files, and {', '.join(MNIST_M)}"
        raise DataError(f"dataset = 'digit5': data-dir = {settings.data_dir!r} must have {wanted}")
    return tuple(path for paths in files.values() for path in paths)


def _digit5_files(settings: DataSettings) -> dict[str, tuple[Path, ...]]:
    data_dir, complete = data_dir_of(settings), dict[str, tuple[Path, ...]]()
    for name in DIGIT5:
        with suppress(DataError):
            paths = tuple(data_dir / file for file in MNIST_M) if name == "mnist-m" else locate_public(name, settings)
            complete |= {name: paths} if all(path.exists() for path in paths) else {}
    return complete


def read_digit5(settings: DataSettings) -> RawData:
    """The domains that are there, at 32×32 RGB: the first 7,500 training and 2,000 test images of each."""
    parts, official, files = [], [], _digit5_files(settings)
    if absent := ", ".join(name for name in DIGIT5 if name not in files):
        print(f"protofl: digit5 without {absent}, not in data-dir = {settings.data_dir!r}", file=sys.stderr)
    for name, paths in files.items():
        data = _mnist_m(*paths) if name == "mnist-m" else read_public(name, settings)
        marks = (np.flatnonzero(data.official == part)[:most] for part, most in enumerate(MOST_OF_DIGIT5))
        images = resized(data.inputs[rows := np.concatenate([*marks])], 32)
        parts.append((np.broadcast_to(images, (len(rows), 3, 32, 32)), data.labels[rows]))
        official.append(data.official[rows])
    return replace(_of_domains(parts, tuple(files)), official=np.concatenate(official))


def _mnist_m(*paths: Path) -> RawData:
    """Two folders, and a list of the files of each, ``00000000.png 5`` (Ganin et al., JMLR 2016)."""
    rows = [(part, line.split()) for part in (0, 1) for line in paths[2 + part].read_text().splitlines()]
    images = np.stack([read_image(paths[part] / name, 32) for part, (name, _) in rows])
    labels, split = [int(label) for _, (_, label) in rows], [part for part, _ in rows]
    return from_arrays({"inputs": images, "labels": labels, "split": split, "classes": range(10)}, str(paths[0].parent))


def _of_domains(parts: list[tuple[Images, Ints]], names: tuple[str, ...]) -> RawData:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    domains = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
    return RawData(images, labels, domains, np.zeros(len(labels), np.uint8), tuple(map(str, range(10))), names)


# -- looks: ink [28, 28], the domain's other inks -> pixels [28, 28, 3]
def _printed_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """Dark strokes on slightly yellowed paper."""
    paper = np.array([1.0, 0.98, 0.92]) * rng.uniform(0.85, 1.0)
    return _mixed(ink, paper, np.full(3, rng.uniform(0.0, 0.3))) + rng.normal(0, 0.015, (SIDE, SIDE, 1))


def _photo_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """Absolute difference of the strokes and a piece of a photograph, as in MNIST-M (Ganin et al., 2016)."""
    photo = _photographs()[rng.integers(2)]
    top, left = (int(rng.integers(limit - SIDE)) for limit in photo.shape[:2])
    difference: Pixels = np.abs(photo[top : top + SIDE, left : left + SIDE] - ink[..., None])
    return difference


def _inverted_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """Dark strokes on light grey, of changing contrast, under strong noise."""
    ground, contrast = rng.uniform(0.6, 0.95), rng.uniform(0.4, 0.6)
    return np.repeat((ground - contrast * ink + rng.normal(0, 0.12, (SIDE, SIDE)))[..., None], 3, axis=2)


def _coloured_look(ink: Ink, others: list[Ink], rng: np.random.Generator) -> Pixels:
    """A coloured digit on a coloured gradient, between parts of two others, as on house numbers (SVHN)."""
    dark, light = rng.uniform(0.0, 0.5, size=3), rng.uniform(0.6, 1.0, size=3)
    ground, stroke = (dark, light) if rng.random() < 0.5 else (light, dark)
    slope = np.linspace(-0.15, 0.15, SIDE)
    gradient = slope[:, None] * rng.uniform(-1, 1) + slope[None, :] * rng.uniform(-1, 1)
    scene = ink.copy()
    for shift in (-19, 19):
        neighbour = np.pad(others[rng.integers(len(others))], ((0, 0), (19, 19)))
        scene = np.maximum(scene, neighbour[:, 19 - shift :][:, :SIDE])
    return _mixed(scene, ground, stroke) + gradient[..., None]


def _mixed(ink: Ink, ground: NDArray[np.float64], stroke: NDArray[np.float64]) -> Pixels:
    return ground + ink[..., None] * (stroke - ground)


@lru_cache(maxsize=1)
def _photographs() -> list[Pixels]:
    """Two photographs, float32 [214, 320, 3] in [0, 1]: at half their size, so that a piece shows some structure."""
    from sklearn.datasets import load_sample_images

    return [image[::2, ::2].astype(np.float32) / 255 for image in load_sample_images().images]


DOMAINS: dict[str, tuple[Callable[[Ink, list[Ink], np.random.Generator], Pixels], int, str]] = {
    "scanned": (lambda ink, *_: _mixed(ink, np.zeros(3), np.ones(3)), PER_CLASS, ""),
    "printed": (_printed_look, 0, PRINTED_FONTS),
    "photo": (_photo_look, PER_CLASS, ""),
    "inverted": (_inverted_look, PER_CLASS, ""),
    "coloured": (_coloured_look, PER_CLASS // 2 - 1, COLOURED_FONTS),
}  # each domain's look, how many images of a digit are scanned ones, and the fonts of the others


# -- strokes
def _scanned(scan: Ink, rng: np.random.Generator) -> Ink:
    from PIL import Image

    side = int(rng.integers(22, 27))
    large = Image.fromarray(np.rint(scan * 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    canvas = Image.new("L", (SIDE, SIDE))
    canvas.paste(large, ((SIDE - side) // 2, (SIDE - side) // 2))
    return _jittered(canvas, rng)


def _printed(digit: int, fonts: str, rng: np.random.Generator) -> Ink:
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    names = fonts.split()
    file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{names[rng.integers(len(names))]}.ttf")
    font = ImageFont.truetype(str(file), int(rng.integers(19, 27)))
    canvas = Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(canvas).text((SIDE / 2, SIDE / 2), str(digit), fill=255, font=font, anchor="mm")
    return _jittered(canvas, rng)


def _jittered(canvas: Any, rng: np.random.Generator) -> Ink:
    from PIL import Image

    shift = tuple(int(step) for step in rng.integers(-2, 3, size=2))
    turned = canvas.rotate(float(rng.uniform(-12, 12)), Image.Resampling.BILINEAR, translate=shift)
    return np.asarray(turned, dtype=np.float32) / np.float32(255)
