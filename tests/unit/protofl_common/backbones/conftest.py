"""A few of the embedded digit-domains' images, and files like those of the embedded backbones."""

import base64
import json

import pytest
from safetensors.torch import save

from protofl_common.backbones.load import SIZE
from protofl_common.data.sources import SOURCES
from protofl_common.experiment.settings import Settings, default_run_config

NAMES = ("glyphs", "fractals", "scenes")
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="session")
def digit_domains():
    return SOURCES["digit-domains"].read(Settings.from_run_config(default_run_config()).data)


def write_weights(file, state, mean=HALF, std=HALF):
    """Write a `SmallResNet`'s state dict as the embedded backbones' files have it.

    Kernels are in float16, as there; ``mean`` and ``std`` are of the images, by channel.
    """
    packed = {name: value.half() if value.ndim > 1 else value for name, value in state.items()}
    content = {
        "size": SIZE,
        "mean": mean,
        "std": std,
        "weights": base64.b64encode(save(packed)).decode(),
    }
    file.write_text(json.dumps(content))
