"""Gaussian heads of frozen features, server half: the moments of all clients together.

Other half: `client_app/algorithms/gaussian.py`.

    π, m, S ← Σ_i (n_i / Σ n) · (π, m, S)_i      n_i training samples of client i

Under differential privacy the result is repaired (`ClassMoments.repair`), and a class whose count is not clear of the
noise, twice its deviation, is left out. Nothing here depends on how the samples are divided, but for bounds on single
clients: with ``liars`` a client weighs at most as ``max-samples-ratio`` and ``max-samples-lead`` say.
"""

import math

from torch import Tensor

from protofl_common.experiment.catalog import GaussianHparams
from protofl_common.maths.aggregation import merge_weights
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.privacy.release import count_noise
from server_app.strategies.base import Federation, Payload, ServerStrategy, StateDict, Template, Upload, template_of


class Gaussian(ServerStrategy[GaussianHparams]):
    """Keeps the moments of the last round's clients; each round asks for them anew."""

    state: tuple[str, ...] = ("moments", "counts_C")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        sizes = self.num_classes, self.card.input_shape[0], self.hparams.head
        self.template = template_of(ClassMoments(*sizes).state_dict())
        self.moments: StateDict = {}
        self.counts_C: Tensor | None = None

    def payload_down(self) -> Payload:
        return Payload(moments=self.moments or None, counts=self.counts_C)

    def templates(self) -> dict[str, Template]:
        return {"moments": self.template}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        samples = sum(upload.train_samples for upload in uploads)
        shares = [upload.train_samples / samples for upload in uploads]
        self.moments = merge_weights([upload.payload.weights("moments") or {} for upload in uploads], shares, "mean", 0)
        if (plan := self.settings.plan(1)) is not None:
            spread = count_noise(plan.table_noise) * math.sqrt(sum(upload.clients for upload in uploads))
            ClassMoments.of(self.moments).repair(2 * spread / samples, self.settings.privacy.dp_feature_clip)
        self.counts_C = (self.moments["shares"] * samples).round().long()
        return {"samples": float(samples)}
