"""The way out: what a client's algorithm wants to send, less what its privacy settings keep back.

Whatever a message says of classes passes here: prototypes, clusters, outputs and counts; so do the figures of an
evaluation. Weights and losses do not.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from client_app.evaluation import Evaluation
from client_app.site import Site
from protofl_common.basics.seeding import derive_seed
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import FEWEST_TESTED
from protofl_common.data.raw import Ints
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy.release import fresh_draw, large_enough, noised, private_hits
from protofl_common.runs.evaluation_metrics import RECALL
from protofl_common.wire.payloads import Payload, Value
from protofl_common.wire.schema import vectors_in
from protofl_common.wire.statistics import ClientStatistics


def protected(upload: Payload, site: Site, number: int) -> Payload:
    """The upload of the round ``number`` as it may leave.

    SettingsError where prototypes without counts would leave under ``min-class-samples``.
    """
    return Payload(**{name: _allowed(name, value, site, number) for name, value in upload.entries.items()})


def disclosed(evaluation: Evaluation, labels_N: Ints, site: Site) -> Evaluation:
    """The part of an evaluation on samples with ``labels_N`` that the report may hold.

    Under ``min-class-samples = k`` above 1 there is no figure of fewer than max(k, 20) samples. Under differential
    privacy there are numbers of right predictions with noise, which the ledger was charged for, and nothing else.
    """
    least, plan = site.settings.privacy.min_class_samples, site.plan
    fewest = max(least, FEWEST_TESTED) if least > 1 else 0
    if len(labels_N) < fewest:
        return Evaluation()
    if plan is not None:
        return Evaluation(private_hits(evaluation.correct, len(labels_N), plan.figure_noise, fresh_draw()))
    small = np.bincount(labels_N, minlength=site.num_classes) < fewest
    few = {f"{RECALL}/{label}" for label in small.nonzero()[0]}
    metrics = {name: value for name, value in evaluation.metrics.items() if name.partition("/")[2] not in few}
    return Evaluation(evaluation.correct, metrics)


def _allowed(name: str, value: Value, site: Site, number: int) -> Value:
    least = site.settings.privacy.min_class_samples
    if isinstance(value, Tensor):
        return _without_small(value, least)
    if isinstance(value, ClientStatistics):
        return dataclasses.replace(value, counts=_without_small(value.counts, least))
    return _allowed_prototypes(name, value, site, number) if isinstance(value, Prototypes) else value


def _allowed_prototypes(name: str, prototypes: Prototypes, site: Site, number: int) -> Prototypes:
    privacy, noise, declared = site.settings.privacy, site.settings.noise, vectors_in(site.settings.exchange.up)
    if privacy.min_class_samples > 1:
        if prototypes.counts is None:
            lacks = f"{site.settings.run.algo} does not say how many samples stand behind its {name}"
            raise SettingsError(f"min-class-samples = {privacy.min_class_samples}: {lacks}")
        prototypes = large_enough(prototypes, privacy.min_class_samples)
    if noise.prototype_noise != "none":
        seed = derive_seed(site.settings.run.seed, "prototype-noise", site.name, number, name)
        prototypes = dataclasses.replace(prototypes, means=noised(prototypes.means, noise.prototype_noise, seed))
    return prototypes if name in declared and declared[name].counts else prototypes.without_counts()


def _without_small(counts_C: Tensor, least: int) -> Tensor:
    return torch.where(counts_C < least, 0, counts_C)
