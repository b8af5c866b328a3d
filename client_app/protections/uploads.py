"""Changes of an upload on its way out: ``min-class-samples``, and the noise of papers."""

from dataclasses import replace

import torch

from client_app.learning.evaluation import Evaluation
from client_app.learning.training import Step
from client_app.protections.base import Protection
from client_app.protections.private_step import PrivateStep
from client_app.site.consent import count_evaluation
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import FEWEST_TESTED
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy.plan import plan_of
from protofl_common.privacy.release import (
    large_counts,
    large_enough,
    noised_prototypes,
    rounded_count,
)
from protofl_common.wire.payloads import Payload, Value
from protofl_common.wire.records import Report


class SmallClasses(Protection):
    """Nothing leaves of a class of fewer than k samples, no figure of fewer than max(k, 20).

    Prototypes, clusters, outputs, counts, figures and losses pass here. Weights do not. Figures are
    rounded, and a site's operator approves so many evaluations: many exact ones, of models of the
    server's choice, read a sample digit by digit. Under ``dp`` noise and ledger do that.
    """

    name = "small classes"

    @property
    def least(self) -> int:
        return self.client.settings.privacy.min_class_samples

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return settings.privacy.min_class_samples > 1

    @property
    def is_exact(self) -> bool:
        return self.client.settings.privacy.dp == "none"

    def admit(self) -> None:
        """Count the evaluation; RefusedMessage beyond ``max-evaluations``."""
        client = self.client
        if client.study is not None and client.evaluates and self.is_exact:
            count_evaluation(client.site_folder, client.study, client.node)

    def charge(self) -> None:
        """Refuse to answer where no class is large, with SettingsError; nothing is charged here.

        The introduction refuses, too, but a server may leave that out. With secure aggregation
        the server learns sums over clients only, none of which shows a small class of this one.
        """
        if not self.client.settings.privacy.sums_only:
            self.work.require_large_classes()

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        """Drop all figures of few samples, and round numbers of right predictions.

        Metrics are of large classes already, and rounded (`evaluate`).
        """
        if samples < max(self.least, FEWEST_TESTED):
            return Evaluation()
        if not self.is_exact:  # noise is for a sample, and rounding would make it count for k
            return evaluation
        correct = {
            kind: rounded_count(right, samples, self.least)
            for kind, right in evaluation.correct.items()
        }
        return replace(evaluation, correct=correct)

    def upload(self, upload: Payload) -> Payload:
        """Drop small classes; SettingsError for prototypes that do not come with their counts."""
        entries = {
            name: self._of_large_classes(name, value) for name, value in upload.entries.items()
        }
        return Payload(**entries)

    def report(self, report: Report) -> Report:
        """Drop the losses: a server may ask for the loss of one class."""
        return replace(report, losses={})

    def _of_large_classes(self, name: str, value: Value) -> Value:
        if isinstance(value, torch.Tensor):
            return self.post_processed(large_counts, value, self.least)
        if not isinstance(value, Prototypes):
            return value
        if value.counts is None:
            algo = self.client.settings.run.algo
            lacks = f"{algo} does not say how many samples stand behind its {name}"
            raise SettingsError(f"min-class-samples = {self.least}: {lacks}")
        large = self.post_processed(large_enough, value, self.least)
        if not self.is_exact:  # which classes are large is shown with noise only
            return large
        return large.only(torch.isin(large.labels, self.work.large_classes))


class PaperNoise(Protection):
    """The papers' ``gradient-noise`` and ``prototype-noise``.

    They guarantee nothing: a server knows the seed.
    """

    name = "a paper's noise"

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return bool(settings.noise.gradient_noise) or settings.noise.prototype_noise != "none"

    def step(self, step: Step) -> Step:
        """Take steps of DP-SGD with the noise of ε = ``gradient-noise``; nothing else has any."""
        settings = self.client.settings
        epsilon = settings.noise.gradient_noise
        if not epsilon:
            return step
        privacy = replace(settings.privacy, dp_epsilon=epsilon)
        training, samples = settings.training, len(self.work.data.train_labels)
        no_tables = (0,) * settings.run.rounds
        plan = plan_of(privacy, samples, training.batch_size, training.local_epochs, no_tables, 0)
        return PrivateStep.of(step, plan)

    def upload(self, upload: Payload) -> Payload:
        """Add ``prototype-noise`` to all prototypes."""
        kind = self.client.settings.noise.prototype_noise
        if kind == "none":
            return upload
        entries = dict(upload.entries)
        for name, value in entries.items():
            if isinstance(value, Prototypes):
                seed = self.client.seed_for("prototype-noise", self.client.instructions.round, name)
                entries[name] = self.post_processed(noised_prototypes, value, kind, seed)
        return Payload(**entries)
