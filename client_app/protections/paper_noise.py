"""The noise of papers, on images, gradients and prototypes. Its ε, where a paper says one, holds for nothing sent."""

from __future__ import annotations

from dataclasses import replace

from client_app.protections.base import Protection
from client_app.protections.private_step import PrivateStep
from client_app.training import Step
from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy.release import noised
from protofl_common.wire.payloads import Payload


class PaperNoise(Protection):
    """``gradient-noise`` and ``prototype-noise``; images get theirs where they are read (`Client.data`)."""

    name = "a paper's noise"

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        """With either setting."""
        return bool(settings.noise.gradient_noise) or settings.noise.prototype_noise != "none"

    def step(self, step: Step) -> Step:
        """DP-SGD's, with the paper's ε."""
        plan = self.client.settings.plan_of_paper(len(self.client.data.train_labels))
        return step if plan is None else PrivateStep.of(step, plan)

    def upload(self, upload: Payload, round_number: int) -> Payload:
        """Add noise to all prototypes."""
        kind = self.client.settings.noise.prototype_noise
        if kind == "none":
            return upload
        entries = dict(upload.entries)
        for name, value in entries.items():
            if isinstance(value, Prototypes):
                of_entry = "prototype-noise", self.client.name, round_number, name
                seed = derive_seed(self.client.settings.run.seed, *of_entry)
                entries[name] = replace(value, means=noised(value.means, kind, seed))
        return Payload(**entries)
