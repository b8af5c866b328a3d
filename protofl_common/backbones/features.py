"""Features of frozen backbones: r(x), K backbones side by side (FedPCL, Section 3).

They are computed once for each set of images.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from protofl_common.backbones.load import Backbone, load_backbone
from protofl_common.basics.files import digest, replacing
from protofl_common.basics.text import as_file_name
from protofl_common.config.options import SettingsError
from protofl_common.data.raw import Inputs, are_images, described
from protofl_common.data.store import cached

FORMAT = 1
"""Raised whenever the same backbones give other features, as after a change of the resizing."""


def cached_features(
    images: Inputs, names: Sequence[str], device: torch.device, cache_dir: Path, key: str
) -> Tensor:
    """Return `extract_features` of the images, from the cache where they have been computed before.

    Treat the result as read-only. It is kept in ``cache_dir``, in a file with ``key`` and a digest
    of the images and the backbones in its name. BackboneError where a backbone cannot be had,
    DataError where the cache cannot be used.
    """
    backbones = [load_backbone(name, device) for name in names]
    content = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
    identities = [backbone.identity for backbone in backbones]
    entry = digest(FORMAT, content, images.shape, identities, device.type)
    file = cache_dir / "features" / f"{as_file_name(key)}-{entry}.safetensors"
    shape = (len(images), sum(backbone.width for backbone in backbones))

    def build() -> Tensor:
        features = extract_features(images, names, device)
        with replacing(file, private=True) as beside:
            save_file({"features": features}, beside)
        return features

    return cached(file, lambda: _read(file, shape), build)


def _read(file: Path, shape: tuple[int, int]) -> Tensor | None:
    """Return the features in a file of the cache.

    None, so that they are computed anew, where it has none of this ``shape``, or cannot be read.
    """
    try:
        features = load_file(file)["features"]
    except (OSError, SafetensorError, KeyError):
        return None
    is_right = features.dtype == torch.float32 and features.shape == shape
    return features if is_right and features.isfinite().all() else None


def extract_features(
    images: Inputs, names: Sequence[str], device: torch.device, batch_size: int = 64
) -> Tensor:
    """Compute the frozen backbones' features of images, float32 [N, F_1 + … + F_K] on the CPU.

    Images are uint8 [N, channels, H, W]; SettingsError for others. The backbones' features stand
    side by side, in the order of ``names``. Grey images get three equal channels; each backbone
    sees them stretched to its own size (bilinear, antialiased) and normalised its own way. Nothing
    is random, and the batch size changes no more than rounding.
    """
    check_images(images, names)
    backbones = [load_backbone(name, device) for name in names]
    features = torch.empty(len(images), sum(backbone.width for backbone in backbones))
    with torch.inference_mode():
        for start in range(0, len(images), batch_size):
            rows = slice(start, start + batch_size)
            batch = torch.from_numpy(np.ascontiguousarray(images[rows])).to(device)
            features[rows] = features_of(batch, backbones)
    return features


def check_vectors(inputs: Inputs, algo: str) -> None:
    """Raise SettingsError unless samples are vectors of features.

    Without backbones ``algo`` takes no other samples; the error names it.
    """
    if inputs.ndim != 2 or inputs.dtype != np.float32:
        raise SettingsError(
            f"backbones = 'none': {algo} then takes vectors of features, float32 [features];"
            f" a sample of these data is {described(inputs)};"
            " choose auto, or name backbones, for images"
        )


def check_images(inputs: Inputs, names: Sequence[str]) -> None:
    """Refuse samples that are no images which backbones can take, with SettingsError."""
    if not are_images(inputs) or inputs.shape[1] not in (1, 3):
        raise SettingsError(
            f"backbones = {', '.join(names)}: they see images, uint8 [1 or 3, H, W];"
            f" a sample of these data is {described(inputs)};"
            " choose backbones = none (gaussian and mpft then take them as vectors), or an"
            " algorithm that can do without"
        )


def feature_widths(names: Sequence[str]) -> tuple[int, ...]:
    """Load backbones, and return the number of features F_k of each, in the order of ``names``."""
    return tuple(load_backbone(name, torch.device("cpu")).width for name in names)


def features_of(batch: Tensor, backbones: list[Backbone]) -> Tensor:
    """Return the backbones' features side by side: pixels 0..255 [B, 1 or 3, H, W] -> [B, F].

    Backbones of one size share the stretched images.
    """
    colour = batch.expand(-1, 3, -1, -1).float()  # grey images get three equal channels
    pixels_of_size = {}
    for size in {backbone.size for backbone in backbones}:
        pixels = colour
        if colour.shape[2:] != (size, size):
            pixels = F.interpolate(colour, (size, size), mode="bilinear", antialias=True)
        pixels_of_size[size] = pixels.contiguous(memory_format=torch.channels_last)
    features = [backbone.features(pixels_of_size[backbone.size]) for backbone in backbones]
    return torch.cat(features, dim=1)
