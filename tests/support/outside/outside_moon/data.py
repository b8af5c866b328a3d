"""Stripes of three directions, as ``dataset = "outside_moon.data:stripes"``."""

from typing import Any

import numpy as np


def stripes(data_dir: str) -> dict[str, Any]:
    """Return 600 images uint8 [1, 28, 28], of which every fifth is for testing.

    The direction, the width and the start of the stripes vary, and each pixel has noise. These data
    are computed, so they do not need the setting data-dir.
    """
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 3
    y, x = np.mgrid[0:28, 0:28]
    angles = labels * np.pi / 3 + rng.normal(0, 0.15, 600)
    phases = x * np.cos(angles)[:, None, None] + y * np.sin(angles)[:, None, None]
    waves = np.sin(phases * rng.uniform(0.6, 1.0, (600, 1, 1)) + rng.uniform(0, 6, (600, 1, 1)))
    images = 127.5 + 80 * waves + rng.normal(0, 25, waves.shape)
    split = np.where(np.arange(600) % 5, "train", "test")
    return {
        "inputs": images.clip(0, 255).astype(np.uint8)[:, None],
        "labels": labels,
        "classes": ["horizontal", "rising", "falling"],
        "split": split,
    }
