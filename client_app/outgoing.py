"""The way out: what a client's algorithm wants to send, less what its privacy settings keep back.

Whatever a message says of classes passes here: prototypes, clusters, outputs, counts, and figures for the report. What
a message says of all samples together (weights, losses, accuracies) does not.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from client_app.site import Site
from protofl_common.config.options import SettingsError
from protofl_common.datasets.raw import Ints
from protofl_common.evaluation_metrics import RECALL
from protofl_common.insight import Insight
from protofl_common.privacy.release import large_enough, noised
from protofl_common.prototypes import Prototypes
from protofl_common.seeding import derive_seed
from protofl_common.wire.payloads import Payload, Value
from protofl_common.wire.schema import Vectors


def outgoing(upload: Payload, site: Site, number: int) -> Payload:
    """The upload of the round ``number`` as it may leave.

    SettingsError where prototypes without counts would leave under ``min-class-samples``.
    """
    return Payload(**{name: _allowed(name, value, site, number) for name, value in upload.entries.items()})


def told_metrics(metrics: dict[str, float], labels_N: Ints, site: Site) -> dict[str, float]:
    """Without the recalls of classes of fewer than ``min-class-samples`` of the samples that they are of."""
    counts_C = torch.from_numpy(np.bincount(labels_N, minlength=site.num_classes))
    small = counts_C < site.settings.privacy.min_class_samples
    few = {f"{RECALL}/{label}" for label in small.nonzero().flatten().tolist()}
    return {name: value for name, value in metrics.items() if name.partition("/")[2] not in few}


def _allowed(name: str, value: Value, site: Site, number: int) -> Value:
    least = site.settings.privacy.min_class_samples
    if isinstance(value, Tensor):
        return _without_small(value, least)
    if isinstance(value, Insight):
        return dataclasses.replace(value, counts=_without_small(value.counts, least))
    return _allowed_prototypes(name, value, site, number) if isinstance(value, Prototypes) else value


def _allowed_prototypes(name: str, prototypes: Prototypes, site: Site, number: int) -> Prototypes:
    privacy, entry = site.settings.privacy, site.settings.exchange.up.get(name)
    if privacy.min_class_samples > 1:
        if prototypes.counts is None:
            lacks = f"{site.settings.run.algo} does not say how many samples stand behind its {name}"
            raise SettingsError(f"min-class-samples = {privacy.min_class_samples}: {lacks}")
        prototypes = large_enough(prototypes, privacy.min_class_samples)
    if privacy.prototype_noise != "none":
        seed = derive_seed(site.settings.run.seed, "prototype-noise", site.name, number, name)
        prototypes = dataclasses.replace(prototypes, means=noised(prototypes.means, privacy.prototype_noise, seed))
    return prototypes if isinstance(entry, Vectors) and entry.counts else prototypes.without_counts()


def _without_small(counts_C: Tensor, least: int) -> Tensor:
    return torch.where(counts_C < least, 0, counts_C)
