"""The digit data sets: ``digit-domains`` is drawn in five looks; ``digit-mix``; Digit-5.

Every domain of ``digit-domains`` has `PER_CLASS` images of each digit, 28×28 RGB. The strokes come
from scikit-learn's 1,797 scanned digits, of which no two domains share one, or from matplotlib's
fonts; the photographs are scikit-learn's two. ``two-digits`` shows two of its digits at once. The
images depend on the versions of these packages, not on the run's seed. ``digit-mix`` stands in for
Digit-5 with looks like photographs behind the digit (MNIST-M; Ganin et al., JMLR 2016), noise
(SynthDigits), coloured numbers with neighbours (SVHN).
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.sections import DataSettings
from protofl_common.data.images import data_dir_of
from protofl_common.data.published import MNIST_M, locate_public, read_public
from protofl_common.data.raw import DataError, Floats, Images, Ints, RawData, resized

PER_CLASS = 50
SEED = 20240229
SIDE = 28  # pixels a side
CANVAS_SIDE = 40  # of two digits
CANVASES_OF_AN_IMAGE = 6
TRAINED_PER_CLASS = 35  # images of a digit and domain whose canvases are for training
REAL = ("mnist", "usps")
LOOKS = ("photo", "inverted", "coloured")
"""The domains of ``digit-mix``: of real sets, and of ``digit-domains``."""
REAL_PER_CLASS = 200
"""Images of each digit that ``digit-mix`` takes of a real set: the first of its training part."""
DIGIT5 = ("mnist", "mnist-m", "usps", "svhn")
"""The domains of Digit-5 but for SynthDigits, which cannot be had."""
MOST_OF_DIGIT5 = (7500, 2000)
"""Images of a domain for training and for testing, as in the first papers on Digit-5."""
PRINTED_FONTS = (
    "DejaVuSans DejaVuSans-BoldOblique DejaVuSerif DejaVuSerif-Italic DejaVuSansMono "
    "DejaVuSansMono-Bold STIXGeneral STIXGeneralBolIta cmr10 cmtt10"
)
COLOURED_FONTS = (
    "DejaVuSans-Bold DejaVuSans-Oblique DejaVuSerif-Bold DejaVuSerif-BoldItalic "
    "DejaVuSansMono-Oblique STIXGeneralBol STIXGeneralItalic cmb10 cmss10 cmti10"
)
"""Files of matplotlib; no font serves two domains."""

Generator = np.random.Generator
Ink = NDArray[np.float32]
"""float32 [28, 28] in [0, 1]: 0 paper, 1 ink."""
Pixels = NDArray[np.floating[Any]]
"""Floating point [28, 28, 3] in [0, 1]; values outside are clipped at the end."""


def read_domains(settings: DataSettings) -> RawData:
    """Draw all images of ``digit-domains``, in the order of `DOMAINS`.

    They are the same for all settings and seeds of a run.
    """
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(SEED)
    scans = load_digits()
    unused_scans = []  # of each digit; they are taken one by one, so no two domains share one
    for digit in range(10):
        unused_scans.append(iter(rng.permutation(np.flatnonzero(scans.target == digit))))

    labels = np.tile(np.arange(10), PER_CLASS)
    parts = []
    for domain in DOMAINS.values():
        inks = []
        for number in range(PER_CLASS):
            for digit in range(10):
                if number < domain.scanned:
                    scan = scans.images[next(unused_scans[digit])]
                    inks.append(_scanned(scan / 16, rng))  # 16 is full ink
                else:
                    inks.append(_printed(digit, domain.fonts, rng))
        pixels = np.stack([domain.look(ink, inks, rng) for ink in inks])
        images = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
        parts.append((images.transpose(0, 3, 1, 2), labels))
    return _of_domains(parts, tuple(DOMAINS))


def read_pairs(settings: DataSettings) -> RawData:
    """Draw ``two-digits``: two images of ``digit-domains`` side by side, stretched to a square.

    Both are of one domain. A canvas has a label for each digit, 1 if the digit occurs on it. An
    image is either on canvases for training or on canvases for testing, `CANVASES_OF_AN_IMAGE`
    times.
    """
    single = read_domains(settings)
    rng = np.random.default_rng(SEED)
    # a domain has its images one after the other, the ten digits in turn: the last are for testing
    number_in_domain_N = np.arange(len(single.labels)) % (10 * PER_CLASS)
    is_test_N = number_in_domain_N >= 10 * TRAINED_PER_CLASS
    pairs = []
    for domain in range(len(DOMAINS)):
        for is_part_N in (~is_test_N, is_test_N):
            rows = np.flatnonzero(is_part_N & (single.domains == domain))
            shuffled = [rng.permutation(rows) for _ in range(CANVASES_OF_AN_IMAGE)]
            pairs.append(np.concatenate(shuffled).reshape(-1, 2))
    left, right = np.concatenate(pairs).T  # rows of images, one for each canvas
    labels = np.zeros((len(left), len(single.classes)), np.int64)
    for rows in (left, right):
        labels[np.arange(len(rows)), single.labels[rows]] = 1
    canvases = np.concatenate([single.inputs[left], single.inputs[right]], axis=3)  # along W
    return replace(
        single,
        inputs=resized(canvases, CANVAS_SIDE),
        labels=labels,
        domains=single.domains[left],
        official=is_test_N[left].astype(np.uint8),
    )


def locate_mix(settings: DataSettings) -> tuple[Path, ...]:
    """The files of MNIST and USPS, both in ``data-dir``."""
    return tuple(path for name in REAL for path in locate_public(name, settings))


def read_mix(settings: DataSettings) -> RawData:
    """Read the domains of ``digit-mix``: the data sets `REAL`, and `LOOKS` of ``digit-domains``.

    All images are 28×28 RGB and for training: there is no official test part.
    """
    parts = []
    drawn = read_domains(settings)
    for name in REAL:
        data = read_public(name, settings)
        training = np.flatnonzero(data.official == 0)
        labels = data.labels[training]
        first_of_digits = [training[labels == digit][:REAL_PER_CLASS] for digit in range(10)]
        rows = np.sort(np.concatenate(first_of_digits))
        parts.append(_in_colour(data, rows, SIDE))
    for look in LOOKS:
        rows = np.flatnonzero(drawn.domains == drawn.domain_names.index(look))
        parts.append(_in_colour(drawn, rows, SIDE))
    return _of_domains(parts, REAL + LOOKS)


def locate_digit5(settings: DataSettings) -> tuple[Path, ...]:
    """Return the files of all domains of Digit-5 that are in ``data-dir``.

    DataError for fewer than two domains.
    """
    files_of = _digit5_files(settings)
    if len(files_of) < 2:
        of_mnist_m = ", ".join(f"mnist_m/{file}" for file in MNIST_M)
        raise DataError(
            f"dataset = 'digit5': data-dir = {settings.data_dir!r} must have "
            f"two of {', '.join(DIGIT5)}: torchvision's files, and {of_mnist_m}"
        )
    return tuple(chain.from_iterable(files_of.values()))


def _digit5_files(settings: DataSettings) -> dict[str, tuple[Path, ...]]:
    """Return the files of each domain of Digit-5 that is complete in ``data-dir``, by its name."""
    makes_folder = settings.download and settings.data_dir
    if not makes_folder:  # without a folder, no domain is at fault
        data_dir_of(settings, hint="; name another, or set download = true")
    complete = {}
    for name in DIGIT5:
        with suppress(DataError):  # which `locate_public` raises for a domain that is not there
            complete[name] = locate_public(name, settings)
    return complete


def read_digit5(settings: DataSettings) -> RawData:
    """Read the domains of Digit-5 that are in ``data-dir``, as 32×32 RGB.

    Of each domain the first training and the first test images are taken, at most
    `MOST_OF_DIGIT5`. A line on standard error names the domains that are missing.
    """
    files_of = _digit5_files(settings)
    absent = ", ".join(name for name in DIGIT5 if name not in files_of)
    if absent:
        missing = f"{absent}, not in data-dir = {settings.data_dir!r}"
        print(f"protofl: digit5 without {missing}", file=sys.stderr)

    most_for_training, most_for_testing = MOST_OF_DIGIT5
    parts = []
    official = []
    for name in files_of:
        data = read_public(name, settings)
        training = np.flatnonzero(data.official == 0)[:most_for_training]
        testing = np.flatnonzero(data.official == 1)[:most_for_testing]
        rows = np.concatenate([training, testing])
        parts.append(_in_colour(data, rows, 32))
        official.append(data.official[rows])
    data = _of_domains(parts, tuple(files_of))
    return replace(data, official=np.concatenate(official))


def _in_colour(data: RawData, rows: Ints, side: int) -> tuple[Images, Ints]:
    """Return these samples' images, RGB and of this size, and their labels."""
    images = resized(data.inputs[rows], side)
    rgb = np.broadcast_to(images, (len(rows), 3, side, side))  # a grey image has one channel
    return rgb, data.labels[rows]


def _of_domains(parts: list[tuple[Images, Ints]], names: tuple[str, ...]) -> RawData:
    """Join images and labels of several domains to one data set, all for training."""
    images, labels = zip(*parts, strict=True)
    sizes = [len(domain_labels) for domain_labels in labels]
    return RawData(
        inputs=np.concatenate(images),
        labels=np.concatenate(labels),
        domains=np.repeat(np.arange(len(parts)), sizes),
        official=np.zeros(sum(sizes), np.uint8),
        classes=tuple("0123456789"),
        domain_names=names,
    )


# -- looks: ink [28, 28], all inks of the domain -> pixels [28, 28, 3]
def _scanned_look(ink: Ink, inks: list[Ink], rng: Generator) -> Pixels:
    """Return white strokes on black."""
    return _mixed(ink, np.zeros(3), np.ones(3))


def _printed_look(ink: Ink, inks: list[Ink], rng: Generator) -> Pixels:
    """Return dark strokes on slightly yellowed paper, with grain."""
    paper = np.array([1.0, 0.98, 0.92]) * rng.uniform(0.85, 1.0)
    stroke = np.full(3, rng.uniform(0.0, 0.3))
    grain = rng.normal(0, 0.015, (SIDE, SIDE, 1))
    return _mixed(ink, paper, stroke) + grain


def _photo_look(ink: Ink, inks: list[Ink], rng: Generator) -> Pixels:
    """Return the absolute difference of the strokes and a random piece of a photograph.

    MNIST-M is made so.
    """
    photo = _photographs()[rng.integers(2)]
    height, width, _ = photo.shape
    top = int(rng.integers(height - SIDE))
    left = int(rng.integers(width - SIDE))
    piece = photo[top : top + SIDE, left : left + SIDE]
    difference: Pixels = np.abs(piece - ink[..., None])
    return difference


def _inverted_look(ink: Ink, inks: list[Ink], rng: Generator) -> Pixels:
    """Return dark strokes on light grey, of random contrast, under strong noise."""
    ground = rng.uniform(0.6, 0.95)
    contrast = rng.uniform(0.4, 0.6)
    grey = ground - contrast * ink + rng.normal(0, 0.12, (SIDE, SIDE))
    return np.repeat(grey[..., None], 3, axis=2)


def _coloured_look(ink: Ink, inks: list[Ink], rng: Generator) -> Pixels:
    """Return a coloured digit on a gradient, between parts of two neighbours.

    So look the house numbers of SVHN. The neighbours are drawn from ``inks``, all of the domain.
    """
    ground = rng.uniform(0.0, 0.5, size=3)
    stroke = rng.uniform(0.6, 1.0, size=3)
    is_dark_on_light = rng.random() >= 0.5
    if is_dark_on_light:
        ground, stroke = stroke, ground
    slope = np.linspace(-0.15, 0.15, SIDE)
    downwards = slope[:, None] * rng.uniform(-1, 1)
    sideways = slope[None, :] * rng.uniform(-1, 1)
    gradient = downwards + sideways  # added to all colours; `read_domains` clips the sum

    ink_of_all = ink.copy()
    distance = 19  # pixels from one digit to the next
    for shift in (-distance, distance):  # one neighbour to the left, one to the right
        drawn = inks[rng.integers(len(inks))]
        padded = np.pad(drawn, ((0, 0), (distance, distance)))
        first = distance - shift  # the column of ``padded`` that comes to stand at the left edge
        neighbour = padded[:, first : first + SIDE]
        ink_of_all = np.maximum(ink_of_all, neighbour)
    return _mixed(ink_of_all, ground, stroke) + gradient[..., None]


def _mixed(ink: Ink, ground: Floats, stroke: Floats) -> Pixels:
    return ground + ink[..., None] * (stroke - ground)


@lru_cache(maxsize=1)
def _photographs() -> list[Pixels]:
    """Return scikit-learn's two photographs, float32 [214, 320, 3] in [0, 1].

    They are at half their size, so that a piece of 28×28 pixels shows some structure.
    """
    from sklearn.datasets import load_sample_images

    return [image[::2, ::2].astype(np.float32) / 255 for image in load_sample_images().images]


class Domain(NamedTuple):
    """A domain of ``digit-domains``."""

    look: Callable[[Ink, list[Ink], Generator], Pixels]
    scanned: int  # images of a digit that are scanned ones; the others are printed
    fonts: str  # of the printed ones


# scikit-learn has at least 174 scans of a digit: 50 for each of three domains, 24 for `coloured`
DOMAINS: dict[str, Domain] = {
    "scanned": Domain(_scanned_look, PER_CLASS, ""),
    "printed": Domain(_printed_look, 0, PRINTED_FONTS),
    "photo": Domain(_photo_look, PER_CLASS, ""),
    "inverted": Domain(_inverted_look, PER_CLASS, ""),
    "coloured": Domain(_coloured_look, PER_CLASS // 2 - 1, COLOURED_FONTS),
}


# -- strokes
def _scanned(scan: Ink, rng: Generator) -> Ink:
    """Return the ink of a scanned digit [8, 8]: of random size, nearly centred and upright."""
    from PIL import Image

    side = int(rng.integers(22, 27))
    small = Image.fromarray(np.rint(scan * 255).astype(np.uint8))
    large = small.resize((side, side), Image.Resampling.BICUBIC)
    canvas = Image.new("L", (SIDE, SIDE))
    margin = (SIDE - side) // 2
    canvas.paste(large, (margin, margin))
    return _jittered(canvas, rng)


def _printed(digit: int, fonts: str, rng: Generator) -> Ink:
    """Return the ink of a digit in a random font, of random size, nearly centred and upright."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    names = fonts.split()
    name = names[rng.integers(len(names))]
    file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
    font = ImageFont.truetype(str(file), int(rng.integers(19, 27)))
    canvas = Image.new("L", (SIDE, SIDE))
    middle = (SIDE / 2, SIDE / 2)
    ImageDraw.Draw(canvas).text(middle, str(digit), fill=255, font=font, anchor="mm")
    return _jittered(canvas, rng)


def _jittered(canvas: Any, rng: Generator) -> Ink:
    """Return the ink on a PIL canvas, shifted by up to 2 pixels and turned by up to 12 degrees."""
    from PIL import Image

    shift = tuple(int(step) for step in rng.integers(-2, 3, size=2))
    angle = float(rng.uniform(-12, 12))
    turned = canvas.rotate(angle, Image.Resampling.BILINEAR, translate=shift)
    return np.asarray(turned, dtype=np.float32) / np.float32(255)
