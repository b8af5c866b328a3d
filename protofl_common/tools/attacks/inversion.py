"""Feature inversion: images whose features are those that somebody has sent.

Symbols: P feature vectors μ_p, such as prototypes, of width D; f what makes features of images; x_p an image with
pixels in [0, 1]; TV the mean absolute difference of neighbouring pixels (Mahendran and Vedaldi, "Understanding Deep
Image Representations by Inverting Them", CVPR 2015, with another norm).

    x_p = argmin over x of ‖f(x) − μ_p‖² / ‖μ_p‖² + w · TV(x)

Adam on the pixels' logits, from several beginnings that are nearly grey, of which the one with the least sum is taken.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

BEGINNINGS, STEPS, RATE, SMOOTHNESS = 3, 300, 0.1, 0.2  # of the descent; SMOOTHNESS is w


def inverted(
    features: Callable[[Tensor], Tensor], sent_PD: Tensor, shape: tuple[int, ...], similarity: str = "l2"
) -> Tensor:
    """Images [P, *shape] in [0, 1] whose ``features`` are nearest to what was sent; ``cosine``: in direction only."""
    draw = torch.Generator().manual_seed(0)
    best, least_P = torch.zeros(len(sent_PD), *shape), torch.full((len(sent_PD),), torch.inf)
    for _ in range(BEGINNINGS):
        logits = (torch.randn(best.shape, generator=draw) / 10).requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            images = logits.sigmoid()
            variation_P = images.diff(dim=2).abs().mean((1, 2, 3)) + images.diff(dim=3).abs().mean((1, 2, 3))
            loss_P = _misfit(features(images), sent_PD, similarity) + SMOOTHNESS * variation_P
            loss_P.sum().backward()
            optimizer.step()
        better = loss_P.detach() < least_P
        best[better], least_P[better] = logits.detach().sigmoid()[better], loss_P.detach()[better]
    return best


def correlations(images: Tensor, others: Tensor) -> Tensor:
    """[P, N]: how alike the images [P, …] and the others [N, …] are, over all pixels; 1 for the same up to contrast."""
    rows = [normalize(part.flatten(1) - part.flatten(1).mean(1, keepdim=True), dim=1) for part in (images, others)]
    return rows[0] @ rows[1].T


def _misfit(found_PD: Tensor, sent_PD: Tensor, similarity: str) -> Tensor:
    if similarity == "cosine":
        found_PD, sent_PD = normalize(found_PD, dim=1), normalize(sent_PD, dim=1)
    return (found_PD - sent_PD).square().sum(1) / sent_PD.square().sum(1).clamp(min=1e-12)
