"""Statistics for the run's report, where the run asks and the site allows (`protofl_common/wire/schema.py`)."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from client_app.algorithms.base import ClientAlgorithm
from client_app.client import Client
from protofl_common.backbones.features import feature_widths
from protofl_common.maths.prototypes import class_means
from protofl_common.wire.payloads import ClientStatistics
from protofl_common.wire.schema import Declared, statistics_declared


def statistics_level(client: Client) -> str:
    """Return what the run asks for; ``none`` where the node config, or of own data its silence, forbids it."""
    settings, allowed = client.settings, client.node.statistics
    if allowed is None:
        allowed = settings.data.partition != "own"
    return settings.run.statistics if allowed else "none"


def statistics_of(algorithm: ClientAlgorithm[Any]) -> tuple[ClientStatistics | None, Declared]:
    """Class counts and, with frozen backbones, similarities; and how they are declared."""
    client, declared = algorithm.client, statistics_declared(statistics_level(algorithm.client))
    if not declared:
        return None, declared
    counts_C = client.train_set.labels.cpu().bincount(minlength=client.num_classes)
    return ClientStatistics(counts_C, backbone_similarity(algorithm) if client.settings.backbones else None), declared


def backbone_similarity(algorithm: ClientAlgorithm[Any]) -> Tensor:
    """How alike a client's prototypes from one backbone alone and from all of them are, [K] (FedPCL, Figure 3).

    The inner product of unit vectors, averaged over the client's large classes. "Alone" means that the features of the
    other backbones are put to their mean over the client's training samples, in front of the same projection. The paper
    leaves open how its single-backbone prototypes are made and how the scores are normalised.
    """
    client = algorithm.client
    data, widths = client.train_set, feature_widths(client.settings.backbones)
    labels_N = data.labels.cpu()
    fused = class_means(algorithm.features(data), labels_N, client.num_classes)
    large_P = torch.isin(fused.labels, torch.from_numpy(client.large_classes))
    usual_F = data.in_memory.mean(dim=0, keepdim=True)
    scores, start = [], 0
    for width in widths:
        alone_NF = usual_F.repeat(len(data), 1)
        alone_NF[:, start : start + width] = data.in_memory[:, start : start + width]
        alone = algorithm.features(dataclasses.replace(data, inputs=alone_NF))
        alone_PD = class_means(alone, labels_N, client.num_classes).means
        scores.append(cosine_similarity(alone_PD, fused.means, dim=1)[large_P].mean().nan_to_num())
        start += width
    return torch.stack(scores).float()
