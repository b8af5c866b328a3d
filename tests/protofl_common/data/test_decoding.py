"""Image files decoded by several processes: the same pixels, whatever becomes of the processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protofl_common.data import DataError
from protofl_common.data import images as decoding


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Twenty images; two processes help."""
    monkeypatch.setattr(decoding, "CHUNK", 3)
    monkeypatch.setattr(decoding, "ALONE", 2)
    monkeypatch.setattr(decoding.os, "cpu_count", lambda: 2)
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"bild {number}.png" for number in range(20)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return paths


def test_several_processes_decode_as_one_does_and_say_how_far_they_are(
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(decoding, "PATIENCE", -1.0)
    images = decoding.read_images(files, 8, tmp_path / "cache")
    assert "protofl: 18 of 20 images decoded" in capsys.readouterr().err
    np.testing.assert_array_equal(images, np.stack([decoding.read_image(file, 8) for file in files]))
    assert isinstance(images, np.memmap)  # not in memory
    assert not list((tmp_path / "cache").iterdir())
    files[13].write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bild 13\.png is not a readable image"):
        decoding.read_images(files, 8, tmp_path / "cache")


@pytest.mark.parametrize(("kind", "suffix"), [(np.uint16, "png"), (np.float32, "tif"), (np.int32, "tif")])
def test_pixels_of_more_than_eight_bits_are_refused(tmp_path: Path, kind: type[np.generic], suffix: str) -> None:
    file = tmp_path / f"scan.{suffix}"
    Image.fromarray(np.linspace(0, 4000, 64).reshape(8, 8).astype(kind)).save(file)
    with pytest.raises(DataError, match=rf"scan\.{suffix}.* more than 8 bits"):
        decoding.read_image(file, 8)


def test_a_process_that_dies_is_done_without(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(size: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-Sc", "import sys; sys.stdin.readline(); print('x')"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(decoding, "_helper", dying)
    images = decoding.read_images(files, 8, tmp_path / "cache")
    np.testing.assert_array_equal(images, np.stack([decoding.read_image(file, 8) for file in files]))
