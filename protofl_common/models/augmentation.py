"""FedFA's feature augmentation behind the stages of any network that has convolutions.

The network itself is not changed. Symbols: B samples, C channels; maps [B, C, …] of a stage's
output; μ, σ [B, C] mean and standard deviation over the pixels of each map; M clients.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.99  # α of the averages
EPSILON = 1e-6  # beneath every variance; a batch of one sample has none


class Augmentation(nn.Module):
    """Hooks behind the stages of ``body`` that augment training batches.

    ``averages`` μ̄, σ̄ and ``coefficients`` γ have a module for each stage.
    """

    def __init__(self, body: nn.Module, input_shape: tuple[int, ...], probability: float) -> None:
        """Register a forward hook on the last layer of each stage of ``body``.

        From then on ``body`` augments a training batch at each stage with this ``probability``.
        """
        super().__init__()
        self.probability = probability
        stages = stages_of(body, input_shape)
        self.averages = nn.ModuleList(
            _moment_buffers(channels, initial_mean=0.0) for channels in stages.values()
        )
        self.coefficients = nn.ModuleList(
            _moment_buffers(channels, initial_mean=1.0) for channels in stages.values()
        )
        for number, layer in enumerate(stages):
            layer.register_forward_hook(partial(self._augment, number))

    def _augment(self, stage: int, layer: nn.Module, inputs: object, maps: Tensor) -> Tensor:
        if not layer.training or not self.probability:
            return maps
        if torch.rand(()) >= self.probability:
            return maps
        averages: Any = self.averages[stage]
        coefficients: Any = self.coefficients[stage]
        mean_BC, std_BC = moments(maps)
        with torch.no_grad():
            averages.mean.lerp_(mean_BC.mean(dim=0), 1 - MOMENTUM)
            averages.std.lerp_(std_BC.mean(dim=0), 1 - MOMENTUM)
        new_mean_BC = resampled(mean_BC, coefficients.mean)
        new_std_BC = resampled(std_BC, coefficients.std)
        return with_moments(maps, new_mean_BC, new_std_BC)


def _moment_buffers(channels: int, *, initial_mean: float) -> nn.Module:
    """Make a module of two buffers [C] for a stage: ``mean``, and ``std``, which begins with ones.

    They belong to the means and the standard deviations of the stage's maps.
    """
    buffers = nn.Module()
    buffers.register_buffer("mean", torch.full((channels,), initial_mean))
    buffers.register_buffer("std", torch.ones(channels))
    return buffers


def moments(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return μ and σ of maps [B, C, …]."""
    flat_BCN = maps.flatten(2)
    return flat_BCN.mean(dim=2), (flat_BCN.var(dim=2, correction=0) + EPSILON).sqrt()


def resampled(moment_BC: Tensor, coefficient_C: Tensor) -> Tensor:
    """Draw from N(moment, (γ + 1) Σ²), Σ² the variance of the moment over the batch, γ ≥ 0."""
    variance_C = moment_BC.var(dim=0, correction=0) + EPSILON
    return moment_BC + torch.randn_like(moment_BC) * ((coefficient_C + 1) * variance_C).sqrt()


def with_moments(maps: Tensor, mean_BC: Tensor, std_BC: Tensor) -> Tensor:
    """σ̂ (X − μ) / σ + μ̂: the maps with these moments in the place of theirs."""
    old_mean_BC, old_std_BC = moments(maps)
    shape = (*old_mean_BC.shape, *[1] * (maps.dim() - 2))
    scale = (std_BC / old_std_BC).reshape(shape)
    return (maps - old_mean_BC.reshape(shape)) * scale + mean_BC.reshape(shape)


def fusion_coefficients(averages_MC: Tensor) -> Tensor:
    """γ_j = C · p_j / Σ_j' p_j' with p = 1 / (1 + 1 / Σ²), [C].

    Σ² is the variance over the clients' averages.
    """
    variance_C = averages_MC.double().var(dim=0, correction=0) + EPSILON
    part_C = variance_C / (variance_C + 1)
    return (len(part_C) * part_C / part_C.sum()).to(averages_MC.dtype)


# -- where stages end
def stages_of(body: nn.Module, input_shape: tuple[int, ...]) -> dict[nn.Module, int]:
    """Return the layers that end a stage, and their channels.

    A block is a convolution, or a module with several inside, with the layers up to the next block
    (pooling, ReLU). A stage is as many blocks as have maps of one size. {} where no convolution has
    maps of more than one pixel.
    """
    sizes = _map_sizes(body, input_shape)
    blocks: list[nn.Module] = []  # the last layer of each
    for layer in sizes:
        if _convolves(layer):
            blocks.append(layer)
        elif blocks:
            blocks[-1] = layer

    stages = {}
    pixels = [sizes[layer][1] for layer in blocks]
    for layer, (own, following) in zip(blocks, pairwise([*pixels, 0]), strict=True):
        if own > following:
            stages[layer] = sizes[layer][0]
    return stages


def _layers_of(body: nn.Module) -> list[nn.Module]:
    """List the layers of a network in their order.

    A module is replaced by its parts, again and again, if it is a `Sequential` with convolutions,
    or if it is the only layer with any: then the network is just wrapped in it.
    """
    layers = [body]
    while True:
        has_all_convolutions = sum(map(_convolves, layers)) == 1  # the one that has any
        parts: list[nn.Module] = []
        for layer in layers:
            children = list(layer.children())
            may_open = has_all_convolutions or isinstance(layer, nn.Sequential)
            if may_open and children and _convolves(layer):
                parts += children
            else:
                parts.append(layer)
        if parts == layers:
            return layers
        layers = parts


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())


@torch.no_grad()
def _map_sizes(body: nn.Module, input_shape: tuple[int, ...]) -> dict[nn.Module, tuple[int, int]]:
    """(channels, pixels) of the maps that each of the `_layers_of` makes of a sample.

    Layers whose output is no maps, or maps of a single pixel, are left out.
    """
    sizes: dict[nn.Module, tuple[int, int]] = {}

    def note(layer: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() > 2:
            pixels = output[0, 0].numel()
            if pixels > 1:
                sizes[layer] = (output.shape[1], pixels)

    takes_tokens = any(isinstance(part, nn.Embedding) for part in body.modules())
    like = next(body.parameters(), torch.zeros(()))
    dtype = torch.int64 if takes_tokens else like.dtype
    sample = torch.zeros(1, *input_shape, dtype=dtype, device=like.device)
    hooks = [layer.register_forward_hook(note) for layer in _layers_of(body)]
    was_training = body.training
    body.eval()(sample)
    body.train(was_training)
    for hook in hooks:
        hook.remove()
    return sizes
