"""Image files and what becomes of them: uint8 [3, size, size], decoded by all processors where there are many.

    python -m protofl_common.datasets.decoding SIZE

is a process that helps: each line of its standard input is a JSON list of files, whose pixels it writes one after
another. Processes, not threads: for small images most of the time is spent in Python.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.datasets.raw import DataError, Images
from protofl_common.files import make_private

MOST_PIXELS = 2**26
"""Of an image file; decoded, so many take 200 MB."""
FAST = 4
"""A JPEG file that is read fast is decoded at least that many times as large as it is wanted."""
CHUNK = 128
"""Files that a process is given at a time."""
ALONE = 1000
"""Files for which another process, 0.4 s of CPU until it begins, is not worth while."""
PATIENCE = 5.0
"""Seconds between two words on how far it is."""


def read_images(files: Sequence[Path], size: int, settings: DataSettings) -> Images:
    """uint8 [N, 3, size, size], each as `read_image` reads it, in a nameless file in the cache, not in memory.

    Raises
    ------
    DataError
        For the first file that cannot be read.
    OSError
        When the cache has no room.
    """
    images = _on_disk((len(files), 3, size, size), settings)
    helpers: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
    number = max(1, min(os.cpu_count() or 1, len(files) // ALONE))
    started = [_helper(size) if number > 1 else None for _ in range(number)]

    def decode(start: int) -> None:
        helper, part = helpers.get(), files[start : start + CHUNK]
        view = images[start : start + CHUNK]
        if helper is None or not _helped(helper, part, view):  # then this raises what the helper stumbled over
            for image, file in zip(view, part, strict=True):
                image[:] = read_image(file, size)
        helpers.put(helper)

    for helper in started:
        helpers.put(helper)
    told = time.monotonic()
    try:
        with ThreadPoolExecutor(number) as pool:
            for done, _ in enumerate(pool.map(decode, range(0, len(files), CHUNK))):
                if time.monotonic() > told + PATIENCE:
                    told = time.monotonic()
                    print(f"protofl: {done * CHUNK:,} of {len(files):,} images decoded", file=sys.stderr, flush=True)
    finally:
        for helper in filter(None, started):
            helper.communicate()
    return images


def _on_disk(shape: tuple[int, ...], settings: DataSettings) -> Images:
    from protofl_common.datasets.store import cache_root  # which imports this module

    make_private(folder := cache_root(settings))
    with TemporaryFile(dir=folder) as file:
        file.truncate(length := math.prod(shape))
        if hasattr(os, "posix_fallocate"):  # a full disk is an error now; later it would be the end (SIGBUS)
            os.posix_fallocate(file.fileno(), 0, length)
        return np.memmap(file, np.uint8, "r+", shape=shape)


def _helper(size: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "protofl_common.datasets.decoding", str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def _helped(helper: subprocess.Popen[bytes], files: Sequence[Path], images: Images) -> bool:
    """Whether ``helper`` has filled ``images``; not if it has died, of a file that it cannot read for instance."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    with suppress(OSError):
        helper.stdin.write(json.dumps([os.fspath(file) for file in files]).encode() + b"\n")
        helper.stdin.flush()
        pixels = helper.stdout.read(images.nbytes)
        if len(pixels) == images.nbytes:
            images[:] = np.frombuffer(pixels, np.uint8).reshape(images.shape)
            return True
    return False


def square_rgb(image: Any, size: int) -> Images:
    """A PIL image as uint8 [3, size, size], stretched with PIL's bilinear filter.

    ValueError for pixels of more than 8 bits: PIL would cut them off at 255, and their range is not known.
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError(
            f"its pixels have more than 8 bits (mode {image.mode}), whose range nobody says: save it with 8 bits, or "
            "bring arrays of floating point"
        )
    rgb = image if image.mode == "RGB" else image.convert("RGB")  # which would copy it: half of the time of a photo
    if rgb.size != (size, size):
        rgb = rgb.resize((size, size), resample=2)  # Image.Resampling.BILINEAR
    return np.asarray(rgb).transpose(2, 0, 1)


def read_image(file: Path, size: int, *, fast: bool = False) -> Images:
    """One image file as uint8 [3, size, size]; ``fast``: a JPEG file is not decoded at its full size.

    Raises
    ------
    DataError
        When PIL cannot read the file, or it has more than `MOST_PIXELS`.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.width * image.height > MOST_PIXELS:  # a small file may say so
                raise ValueError(f"{image.width}×{image.height} pixels, above {MOST_PIXELS / 1e6:.0f} million")
            if fast:
                image.draft("RGB", (FAST * size, FAST * size))
            return square_rgb(image, size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not a readable image ({error}); repair or remove it") from error


def main() -> None:
    """What a helper does."""
    size, out = int(sys.argv[1]), sys.stdout.buffer
    for line in sys.stdin:
        for file in json.loads(line):
            out.write(read_image(Path(file), size).tobytes())
        out.flush()


if __name__ == "__main__":
    main()
