"""Gaussian heads of frozen features, server half: the moments of all clients together.

Other half: `client_app/algorithms/gaussian.py`.

    π, m, S ← Σ_i (n_i / Σ n) · (π, m, S)_i      n_i training samples of client i

Under differential privacy the result is repaired (`ClassMoments.repair`), and a class whose count is not clear of the
noise, twice its deviation, is left out. Nothing here depends on how the samples are divided, but for bounds on single
clients: with ``liars`` a client weighs at most as ``max-samples-ratio`` and ``max-samples-lead`` say.

With ``revocable`` the checkpoint has what each site sent, so that a site can be taken out (``protofl forget``), and a
later run (``start-from``) can add sites: its sum begins with the stored ones, of which those that take part count anew.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from protofl_common.config.options import SettingsError
from protofl_common.experiment.catalog import GaussianHparams
from protofl_common.experiment.settings import Settings, to_run_config
from protofl_common.maths.aggregation import merge_weights
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.privacy.release import count_noise
from protofl_common.runs.attributes import restore_attributes
from protofl_common.runs.folder import RunFolder
from server_app.checkpoint import newest_whole
from server_app.strategies.base import Federation, Payload, ServerStrategy, StateDict, Template, Upload, template_of

SAMPLES = "samples"
Sent = dict[str, StateDict]  # Site -> the moments that it has sent, and under `SAMPLES` as how many these weigh
ALIKE = ("gaussian.head", "dataset", "backbones", "dp", "dp-epsilon", "dp-delta", "dp-feature-clip")
"""Settings that moments must have in common to be added."""


class Gaussian(ServerStrategy[GaussianHparams]):
    """Keeps the moments of the last round's clients; each round asks for them anew."""

    state: tuple[str, ...] = ("moments", "counts_C", "sent")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        sizes = self.num_classes, self.card.input_shape[0], self.hparams.head
        self.template = template_of(ClassMoments(*sizes).state_dict())
        self.moments: StateDict = {}
        self.counts_C: Tensor | None = None
        self.sent: Sent = {}
        self.earlier: Sent = self._stored_in(Path(self.hparams.start_from)) if self.hparams.start_from else {}
        if self.earlier:
            self.moments, self.counts_C = pooled(self.earlier, self.settings)

    def payload_down(self) -> Payload:
        return Payload(moments=self.moments or None, counts=self.counts_C)

    def templates(self) -> dict[str, Template]:
        return {"moments": self.template}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        sent = dict(self.earlier)
        for upload in uploads:
            samples = torch.tensor(upload.train_samples, dtype=torch.float64)
            sent[upload.site] = (upload.payload.weights("moments") or {}) | {SAMPLES: samples}
        self.moments, self.counts_C = pooled(sent, self.settings, sum(upload.clients for upload in uploads))
        self.sent = sent if self.hparams.revocable else {}
        return {"samples": sum(float(tensors[SAMPLES]) for tensors in sent.values())}

    def _stored_in(self, run: Path) -> Sent:
        """Return what the sites of an earlier run sent; SettingsError if that is not stored, or cannot be added."""
        what, wanted = f"gaussian.start-from = {str(run)!r}", to_run_config(self.settings)
        earlier = newest_whole(run, without=f"{what}: no folder of a run")
        for key in ALIKE:
            if earlier.settings.get(key) != wanted[key]:
                raise SettingsError(f"{key} = {wanted[key]!r}: {what} has {earlier.settings.get(key)!r}")
        if (classes := RunFolder(run).sites().get("classes")) != list(self.card.classes):
            raise SettingsError(f"{what}: its classes are {classes}, and those of this run {list(self.card.classes)}")
        if not (sent := sent_in(earlier.state)):
            raise SettingsError(f"{what}: what its sites sent is not stored; make it with gaussian.revocable = true")
        return sent


def pooled(sent: Mapping[str, StateDict], settings: Settings, clients: int = 0) -> tuple[StateDict, Tensor]:
    """The moments of all sites together, and how many samples of each class; ``clients``, where one stands for many."""
    weights = [float(tensors[SAMPLES]) for tensors in sent.values()]
    samples = sum(weights)
    sets = [{name: value for name, value in tensors.items() if name != SAMPLES} for tensors in sent.values()]
    moments = merge_weights(sets, [weight / samples for weight in weights], "mean", 0)
    if (plan := settings.plan(1)) is not None:
        spread = count_noise(plan.table_noise) * math.sqrt(max(clients, len(sent)))
        ClassMoments.of(moments).repair(2 * spread / samples, settings.privacy.dp_feature_clip)
    return moments, (moments["shares"] * samples).round().long()


def sent_in(state: Mapping[str, Tensor]) -> Sent:
    """Return what each site sent, from the state of a checkpoint."""
    stored = SimpleNamespace(sent={})
    restore_attributes(stored, ["sent"], state)
    return dict(stored.sent)
