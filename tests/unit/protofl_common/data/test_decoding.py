"""Image files decoded side by side, onto the disk."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protofl_common.data import DataError
from protofl_common.data import images as decoding
from tests.unit.protofl_common.data.conftest import MakeSettings


def test_files_are_decoded_in_their_order_and_it_says_how_far_it_is(
    data_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    files = [tmp_path / f"bild {number}.png" for number in range(20)]
    for path in files:
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    monkeypatch.setattr(decoding, "PATIENCE", -1.0)
    settings = data_settings(image_size=8, cache_dir=str(tmp_path / "cache"))
    images = decoding.read_images(files, settings)
    assert "protofl: 18 of 20 images decoded" in capsys.readouterr().err
    np.testing.assert_array_equal(images, np.stack([decoding.read_image(file, 8) for file in files]))
    assert isinstance(images, np.memmap)  # not in memory
    assert not list((tmp_path / "cache").iterdir())
    for number in (13, 17):
        files[number].write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bild 13\.png is not a readable image"):
        decoding.read_images(files, settings)


@pytest.mark.parametrize(("kind", "suffix"), [(np.uint16, "png"), (np.float32, "tif"), (np.int32, "tif")])
def test_pixels_of_more_than_eight_bits_are_refused(tmp_path: Path, kind: type[np.generic], suffix: str) -> None:
    file = tmp_path / f"scan.{suffix}"
    Image.fromarray(np.linspace(0, 4000, 64).reshape(8, 8).astype(kind)).save(file)
    with pytest.raises(DataError, match=rf"scan\.{suffix}.* more than 8 bits"):
        decoding.read_image(file, 8)
