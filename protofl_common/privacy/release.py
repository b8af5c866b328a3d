"""What may be said of classes: those of enough samples, and with noise where it is asked for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from protofl_common.datasets.inputs import are_images, described
from protofl_common.datasets.raw import DataError, Images, Inputs
from protofl_common.prototypes import Prototypes


def large_enough(prototypes: Prototypes, least: int) -> Prototypes:
    """The prototypes of at least ``least`` samples each, which must have counts.

    Clusters of fewer samples are merged, within a class, to one, which stays if it is large enough. So a class of
    enough samples keeps a prototype. No prototype changes where all are large enough.
    """
    counts = prototypes.counts
    assert counts is not None
    small = counts < least
    if not bool(small.any()):
        return prototypes
    means, labels, sizes = [prototypes.means[~small]], [prototypes.labels[~small]], [counts[~small]]
    for label in prototypes.labels[small].unique():
        rows = small & (prototypes.labels == label)
        if int(total := counts[rows].sum()) >= least:
            mean = (counts[rows].unsqueeze(1) * prototypes.means[rows]).sum(0, keepdim=True) / total
            means, labels, sizes = [*means, mean], [*labels, label.view(1)], [*sizes, total.view(1)]
    merged = Prototypes(torch.cat(means), torch.cat(labels), torch.cat(sizes))
    order = merged.labels.argsort(stable=True)
    return Prototypes(merged.means[order], merged.labels[order], torch.cat(sizes)[order])


def noised(values: Tensor, noise: str, seed: int) -> Tensor:
    """(1 − P) · values + e, with e of scale S (FedPCL, Appendix A.4): ``noise`` is "gaussian S P" or "laplace S P".

    The seed is known to whoever knows the run's, so this guarantees nothing: it repeats a paper's experiment.
    """
    kind, scale, part = noise.split()
    draw = np.random.default_rng(seed)
    of_kind = draw.normal if kind == "gaussian" else draw.laplace
    drawn = torch.from_numpy(of_kind(0.0, float(scale), tuple(values.shape))).to(values)
    return (1 - float(part)) * values + drawn


def noised_images(images: Inputs, noise: str, seed: int) -> Images:
    """`noised` images [N, channels, H, W] of bytes, scaled to -1..1 as in FedPCL's code, and bytes again.

    DataError for inputs that are no images.
    """
    if not are_images(images):
        raise DataError(f"image-noise = {noise!r}: only images take it; a sample is {described(images)}; set none")
    values = noised(torch.from_numpy(images / np.float32(127.5) - 1), noise, seed)
    return np.asarray(((values + 1) * 127.5).round().clamp(0, 255).byte().numpy())
