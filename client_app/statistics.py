"""Statistics for the run's report, where the run asks and the site allows (`protofl_common/wire/statistics.py`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from client_app.algorithms.base import ClientAlgorithm
from client_app.data import Samples
from client_app.site import Site
from protofl_common.backbones.extract import feature_widths
from protofl_common.basics.seeding import derive_seed
from protofl_common.maths.prototypes import class_means
from protofl_common.wire.statistics import MAX_FEATURES, ClientStatistics


def statistics_of(site: Site, algorithm: ClientAlgorithm[Any]) -> ClientStatistics:
    """Class counts and, with frozen backbones, their similarities; at level ``features`` test features too."""
    counts_C = site.train_set.labels.cpu().bincount(minlength=site.num_classes)
    similarity_K = backbone_similarity(site, algorithm) if site.settings.backbones else None
    if site.statistics != "features":
        return ClientStatistics(counts_C, similarity_K)
    some = _some(site.test_set, derive_seed(site.settings.run.seed, "statistics", site.name))
    return ClientStatistics(counts_C, similarity_K, algorithm.features(some).float(), some.labels.cpu())


def backbone_similarity(site: Site, algorithm: ClientAlgorithm[Any]) -> Tensor:
    """How alike a client's prototypes from one backbone alone and from all of them are, [K] (FedPCL, Figure 3).

    The inner product of unit vectors, averaged over the client's classes. "Alone" means that the features of the other
    backbones are put to their mean over the client's training samples, in front of the same projection. The paper
    leaves open how its single-backbone prototypes are made and how the scores are normalised.
    """
    data, widths = site.train_set, feature_widths(site.settings.backbones)
    labels_N = data.labels.cpu()
    fused_PD = class_means(algorithm.features(data), labels_N, site.num_classes).means
    usual_F = data.in_memory.mean(dim=0, keepdim=True)
    scores, start = [], 0
    for width in widths:
        alone_NF = usual_F.repeat(len(data), 1)
        alone_NF[:, start : start + width] = data.in_memory[:, start : start + width]
        alone = algorithm.features(dataclasses.replace(data, inputs=alone_NF))
        alone_PD = class_means(alone, labels_N, site.num_classes).means
        scores.append(cosine_similarity(alone_PD, fused_PD, dim=1).mean())
        start += width
    return torch.stack(scores).float()


def _some(data: Samples, seed: int) -> Samples:
    """At most `MAX_FEATURES` samples, drawn at random, in their order."""
    if len(data) <= MAX_FEATURES:
        return data
    chosen = np.sort(np.random.default_rng(seed).choice(len(data), MAX_FEATURES, replace=False))
    rows = torch.from_numpy(chosen).to(data.labels.device)
    return Samples(data.inputs[rows], data.labels[rows])
