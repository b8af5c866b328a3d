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
        stages = stages_of(body, input_shape)  # the last layer of each -> its channels
        # μ̄, σ̄ of a stage's feature maps, and how far the clients' differ: γ
        self.averages = nn.ModuleList(
            _moment_buffers(channels, initial_mean=0.0) for channels in stages.values()
        )
        self.coefficients = nn.ModuleList(
            _moment_buffers(channels, initial_mean=1.0) for channels in stages.values()
        )
        for number, layer in enumerate(stages):
            layer.register_forward_hook(partial(self._augment, number))

    def _augment(self, stage: int, layer: nn.Module, inputs: object, maps: Tensor) -> Tensor:
        """Return a stage's maps with new moments, which are drawn around theirs.

        Return them unchanged outside training, and in training but with the module's probability of
        a change. The running averages move towards the moments of each batch that is augmented.
        The arguments are those of a forward hook, and the number of the stage.
        """
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
    """Return a module with two buffers [C] for a stage with C channels: ``mean`` and ``std``.

    They hold a number a channel for the means, and for the standard deviations, of the stage's
    maps. Running averages start at a mean of 0 and a deviation of 1, as batch normalisation's do;
    FedFA's coefficients γ start at 1 for both. So only the start of ``mean`` differs.
    """
    buffers = nn.Module()
    buffers.register_buffer("mean", torch.full((channels,), initial_mean))
    buffers.register_buffer("std", torch.ones(channels))
    return buffers


def moments(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation over the pixels of maps [B, C, …], [B, C] each."""
    flat_BCN = maps.flatten(2)
    return flat_BCN.mean(dim=2), (flat_BCN.var(dim=2, correction=0) + EPSILON).sqrt()


def resampled(moment_BC: Tensor, coefficient_C: Tensor) -> Tensor:
    """Draw new moments from N(moment, (γ + 1) Σ²), [B, C].

    Σ² is the variance of the moment over the batch, γ ≥ 0 the channel's coefficient.
    """
    variance_C = moment_BC.var(dim=0, correction=0) + EPSILON
    std_C = ((coefficient_C + 1) * variance_C).sqrt()
    return moment_BC + torch.randn_like(moment_BC) * std_C


def with_moments(maps: Tensor, mean_BC: Tensor, std_BC: Tensor) -> Tensor:
    """Return maps [B, C, …] shifted and scaled to these moments: σ̂ (X − μ) / σ + μ̂."""
    old_mean_BC, old_std_BC = moments(maps)
    shape = (*old_mean_BC.shape, *[1] * (maps.dim() - 2))  # [B, C, 1, …]
    scale = (std_BC / old_std_BC).reshape(shape)
    return (maps - old_mean_BC.reshape(shape)) * scale + mean_BC.reshape(shape)


def fusion_coefficients(averages_MC: Tensor) -> Tensor:
    """Return FedFA's coefficient γ of each channel from the clients' average moments, [C].

    γ_j = C · p_j / Σ_j' p_j' with p = 1 / (1 + 1 / Σ²), where Σ² is the variance over M clients:
    channels in which clients differ are augmented more.
    """
    variance_C = averages_MC.double().var(dim=0, correction=0) + EPSILON
    p_C = variance_C / (variance_C + 1)  # 1 / (1 + 1 / Σ²)
    return (len(p_C) * p_C / p_C.sum()).to(averages_MC.dtype)


# -- where stages end
def stages_of(body: nn.Module, input_shape: tuple[int, ...]) -> dict[nn.Module, int]:
    """Return the last layer of each stage of a network, in order, with the channels of its maps.

    A block is a convolution, or a module with several inside, with the layers up to the next block
    (pooling, ReLU). A stage is a row of blocks whose maps have one size; the next has smaller ones.
    {} where no convolution has maps of more than one pixel.
    """
    sizes = _map_sizes(body, input_shape)
    ends_of_blocks: list[nn.Module] = []
    for layer in sizes:
        if _convolves(layer):
            ends_of_blocks.append(layer)
        elif ends_of_blocks:
            ends_of_blocks[-1] = layer

    stages = {}
    pixels_of_blocks = [sizes[layer][1] for layer in ends_of_blocks]
    # with the 0 the last block always ends a stage
    pixels_of_neighbours = pairwise([*pixels_of_blocks, 0])
    for layer, (pixels, pixels_of_next) in zip(ends_of_blocks, pixels_of_neighbours, strict=True):
        if pixels > pixels_of_next:
            channels, _ = sizes[layer]
            stages[layer] = channels
    return stages


def _layers_of(body: nn.Module) -> list[nn.Module]:
    """Return the layers of a network, in their order.

    A module with convolutions is replaced by its parts, again and again, if it is a `Sequential`,
    or if no other layer has convolutions: then the network is just wrapped in it.
    """
    layers = [body]
    while True:
        is_wrapped = sum(map(_convolves, layers)) == 1
        parts: list[nn.Module] = []
        for layer in layers:
            children = list(layer.children())
            is_container = is_wrapped or isinstance(layer, nn.Sequential)
            if is_container and children and _convolves(layer):
                parts += children
            else:
                parts.append(layer)
        if parts == layers:
            return layers
        layers = parts


def _convolves(module: nn.Module) -> bool:
    """Return whether a module is a convolution or has one inside."""
    return any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())


@torch.no_grad()
def _map_sizes(body: nn.Module, input_shape: tuple[int, ...]) -> dict[nn.Module, tuple[int, int]]:
    """Return (channels, pixels) of the maps that each of the `_layers_of` makes of a sample.

    Layers whose output is no maps, or maps of a single pixel, are left out. To find out, the
    network is run once on a sample of zeros, with hooks that are then removed.
    """
    sizes: dict[nn.Module, tuple[int, int]] = {}

    def note(layer: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() > 2:
            pixels = output[0, 0].numel()
            if pixels > 1:
                sizes[layer] = (output.shape[1], pixels)

    takes_tokens = any(isinstance(part, nn.Embedding) for part in body.modules())
    weight = next(body.parameters(), torch.zeros(()))  # float32 on the CPU if there are none
    dtype = torch.int64 if takes_tokens else weight.dtype
    sample = torch.zeros(1, *input_shape, dtype=dtype, device=weight.device)
    hooks = [layer.register_forward_hook(note) for layer in _layers_of(body)]
    was_training = body.training
    body.eval()(sample)
    body.train(was_training)
    for hook in hooks:
        hook.remove()
    return sizes
