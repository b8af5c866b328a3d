"""Untrained networks of libraries, by name: ``torchvision:resnet18``, ``timm:convnext_atto``.

Only what a library lists as its classifiers has such a name: a name imports nothing else, and reads no weights. The
first convolution gets the images' channels; what enters the last linear layer are the features, brought to D.
"""

from importlib import import_module

import torch
from torch import nn

from protofl_common.backbones.load import classifier_name, without_head
from protofl_common.models.vision import reach_width

HEADS_BESIDE = ("googlenet", "inception_v3")  # in training they would return the scores of auxiliary heads as well


def library_body(name: str, input_shape: tuple[int, ...], feature_dim: int) -> nn.Module:
    """x [B, *input_shape] -> features [B, D]; ValueError for an unknown name, and for images that it cannot take."""
    library, _, arch = name.partition(":")
    try:
        trunk = (_of_torchvision if library == "torchvision" else _of_timm)(arch, input_shape[0])
        with torch.inference_mode():
            features = trunk.eval()(torch.zeros(1, *input_shape))
        return nn.Sequential(trunk.train(), reach_width(features.flatten(1).shape[1], feature_dim))
    except ImportError as error:
        raise ValueError(f"arch = {name!r}: {error.name} is not installed; pip install 'protofl[timm]'") from error
    except Exception as error:  # of the library, about a name or images
        size = f"images {list(input_shape)}; image-size sets another size"
        raise ValueError(f"arch = {name!r}: {error} ({size})") from error


def _of_torchvision(arch: str, channels: int) -> nn.Module:
    from torchvision import models

    beside = {"aux_logits": False, "init_weights": True} if arch in HEADS_BESIDE else {}
    network: nn.Module = models.get_model(classifier_name(arch), weights=None, **beside)
    without_head(network, arch)
    name, first = next(entry for entry in network.named_modules() if isinstance(entry[1], nn.Conv2d))
    if first.in_channels != channels:
        size, bias = (first.kernel_size, first.stride, first.padding), first.bias is not None
        network.set_submodule(name, nn.Conv2d(channels, first.out_channels, *size, bias=bias))
    return network


def _of_timm(arch: str, channels: int) -> nn.Module:
    network: nn.Module = import_module("timm").create_model(arch, pretrained=False, in_chans=channels, num_classes=0)
    return network
