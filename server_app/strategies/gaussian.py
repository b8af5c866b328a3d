"""Gaussian heads of frozen features, server half: the moments of all clients together.

Other half: `client_app/algorithms/gaussian.py`.

    π, m, S ← Σ_i (n_i / Σ n) · (π, m, S)_i      n_i training samples of client i

Under differential privacy the result is repaired (`ClassMoments.repair`), and a class whose count
is not clear of the noise, twice its deviation, is left out. Nothing here depends on how the samples
are divided, but for bounds on single clients: with ``liars`` a client weighs at most as
``max-samples-ratio`` and ``max-samples-lead`` say.

With ``revocable`` the checkpoint has what each site sent, so that a site can be taken out
(``protofl forget``), and a later run (``start-from``) can add sites: its sum begins with the stored
ones, of which those that take part count anew. It may have further classes, or labels, of which
the stored ones know nothing.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from protofl_common.algorithms.gaussian import GaussianHparams
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import Settings, to_run_config
from protofl_common.maths.aggregation import MEAN
from protofl_common.maths.gaussian import ClassMoments, with_classes
from protofl_common.privacy.release import count_noise
from protofl_common.runs.attributes import dictionary_in
from protofl_common.runs.folder import RunFolder
from protofl_common.wire.payloads import template_of
from protofl_common.wire.schema import Template
from server_app.run.checkpoint import newest_undamaged
from server_app.strategies.base import Federation, Payload, ServerStrategy, StateDict, Upload

SAMPLES = "samples"
Sent = dict[str, StateDict]
"""Site -> the moments that it has sent, and under `SAMPLES` the number that they weigh as."""
ALIKE = ("dataset", "backbones", "dp", "dp-epsilon", "dp-delta", "dp-feature-clip")
"""Settings that moments must have in common to be added."""


class Gaussian(ServerStrategy[GaussianHparams]):
    """Keeps the moments of the last round's clients; each round asks for them anew."""

    state = ("moments", "counts_C", "sent")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        empty = ClassMoments(self.num_classes, self.card.input_shape[0])
        self.template = template_of(empty.state_dict())
        self.moments: StateDict = {}
        self.counts_C: Tensor | None = None
        self.sent: Sent = {}
        self.earlier: Sent = {}
        if self.hparams.start_from:
            self.earlier = self._stored_in(Path(self.hparams.start_from))
            self.moments, self.counts_C = pooled(self.earlier, self.settings)

    def payload_down(self) -> Payload:
        return Payload(moments=self.moments or None, counts=self.counts_C)

    def templates(self) -> dict[str, Template]:
        return {"moments": self.template}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        sent = dict(self.earlier)
        for upload in uploads:
            samples = torch.tensor(upload.train_samples, dtype=torch.float64)
            sent[upload.site] = {**upload.weights("moments"), SAMPLES: samples}
        clients = sum(upload.clients for upload in uploads)
        self.moments, self.counts_C = pooled(sent, self.settings, clients)
        self.sent = sent if self.hparams.revocable else {}
        return {"samples": sum(float(tensors[SAMPLES]) for tensors in sent.values())}

    def _stored_in(self, run: Path) -> Sent:
        """Return the moments that an earlier run's sites sent; SettingsError if they do not fit."""
        setting = f"gaussian.start-from = {str(run)!r}"
        config = to_run_config(self.settings)
        earlier = newest_undamaged(run, complaint=f"{setting}: no folder of a run")
        for key in ALIKE:
            before = earlier.settings.get(key)
            if before != config[key]:
                raise SettingsError(f"{key} = {config[key]!r}: {setting} has {before!r}")
        stored = RunFolder(run).sites().get("classes", [])
        classes = list(self.task.class_names)
        if not stored or not set(stored) <= set(classes):
            lacks = f"its classes are {stored}; this run lacks some: {classes}"
            raise SettingsError(f"{setting}: {lacks}")
        sent = sent_in(earlier.state)
        if not sent:
            how = "make it with gaussian.revocable = true"
            raise SettingsError(f"{setting}: what its sites sent is not stored; {how}")
        return {site: with_classes(tensors, stored, classes) for site, tensors in sent.items()}


def pooled(sent: Sent, settings: Settings, clients: int = 0) -> tuple[StateDict, Tensor]:
    """Return the moments of all sites together, and how many samples each class has, [C] int64."""
    samples_of_sites = [float(tensors[SAMPLES]) for tensors in sent.values()]
    total = sum(samples_of_sites)
    shares = [samples / total for samples in samples_of_sites]
    sets = []
    for tensors in sent.values():
        sets.append({name: value for name, value in tensors.items() if name != SAMPLES})
    moments = MEAN.merge_weights(sets, shares)
    plan = settings.plan(1)  # The noise is the same for any number of samples
    if plan is not None:
        num_clients = max(clients, len(sent))  # a secure sum is one entry of many clients
        deviation = count_noise(plan.table_noise) * plan.part_of_each * math.sqrt(num_clients)
        min_share = 2 * deviation / total  # A class with less may be noise alone
        ClassMoments.of(moments).repair(min_share, settings.privacy.dp_feature_clip)
    return moments, (moments["shares"] * total).round().long()


def sent_in(state: Mapping[str, Tensor]) -> Sent:
    """Return what each site sent, from the state of a checkpoint."""
    return dictionary_in(state, "sent")
