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
    """``min-class-samples`` = k: nothing leaves of a class with fewer than k training samples.

    Nor does a figure of fewer than max(k, 20) samples. This holds for prototypes, clusters,
    outputs, counts, figures and losses, not for weights. Figures are rounded, and a site answers
    ``max-evaluations`` of them: many exact ones, of models that the server chooses, would reveal a
    sample digit by digit. Under ``dp``, noise and ledger prevent that.
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
        """True without ``dp``: figures have no noise."""
        return self.client.settings.privacy.dp == "none"

    def admit(self) -> None:
        """Count the evaluation of a site; RefusedMessage beyond its ``max-evaluations``."""
        client = self.client
        if client.study is not None and client.evaluates and self.is_exact:
            count_evaluation(client.site_folder, client.study, client.node)

    def charge(self) -> None:
        """Raise SettingsError where no class of this client has k samples; no ledger is charged.

        A client checks this already when it introduces itself, but a server may leave introductions
        out. With secure aggregation there is no check, as no sum over clients shows a small class
        of this one. Under ``dp`` `require_large_classes` passes, as noise hides small classes.
        """
        if not self.client.settings.privacy.sums_only:
            self.work.require_large_classes()

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        """Drop all figures of too few samples, and round the numbers of right predictions.

        `evaluate_model` has rounded the metrics already, and made them of large classes only.
        """
        if samples < max(self.least, FEWEST_TESTED):
            return Evaluation()
        # noise hides a change of one sample, and rounding could make that a change of k
        if not self.is_exact:
            return evaluation
        correct = {
            kind: rounded_count(right, samples, self.least)
            for kind, right in evaluation.correct.items()
        }
        return replace(evaluation, correct=correct)

    def upload(self, upload: Payload) -> Payload:
        """Return the upload without small classes.

        SettingsError for prototypes without the counts that say which classes are small.
        """
        entries = {
            name: self._of_large_classes(name, value) for name, value in upload.entries.items()
        }
        return Payload(**entries)

    def report(self, report: Report) -> Report:
        """Drop the losses: a server may ask for the loss of one class."""
        return replace(report, losses={})

    def _of_large_classes(self, name: str, value: Value) -> Value:
        """Return counts or prototypes, the entry ``name`` of an upload, without small classes.

        Weights stay as they are.
        """
        if isinstance(value, torch.Tensor):  # the only tensors of uploads are counts [C]
            return self.post_processed(large_counts, value, self.least)
        if not isinstance(value, Prototypes):
            return value
        if value.counts is None:
            raise SettingsError(
                f"min-class-samples = {self.least}: {self.client.settings.run.algo} does not say"
                f" how many samples stand behind its {name}"
            )
        large = self.post_processed(large_enough, value, self.least)
        if not self.is_exact:  # which classes are large is shown with noise only
            return large
        return large.only(torch.isin(large.labels, self.work.large_classes))


class PaperNoise(Protection):
    """The noise of papers (``gradient-noise``, ``prototype-noise``), without a privacy guarantee.

    No ledger counts it, and the server knows the seed of ``prototype-noise``.
    """

    name = "a paper's noise"

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return bool(settings.noise.gradient_noise) or settings.noise.prototype_noise != "none"

    def step(self, step: Step) -> Step:
        """Return a step of DP-SGD with the noise of ε = ``gradient-noise`` for all training.

        Without that setting, return the step as it is. Tables and figures get no noise.
        """
        settings = self.client.settings
        epsilon = settings.noise.gradient_noise
        if not epsilon:
            return step
        privacy = replace(settings.privacy, dp_epsilon=epsilon)
        plan = plan_of(
            privacy,
            samples=len(self.work.data.train_labels),
            batch_size=settings.training.batch_size,
            epochs=settings.training.local_epochs,
            tables=(0,) * settings.run.rounds,  # none in any round: all of ε is for the steps
            evaluate_every=0,
        )
        return PrivateStep(**vars(step), plan=plan)

    def upload(self, upload: Payload) -> Payload:
        """Return the upload with ``prototype-noise`` on all prototypes."""
        kind = self.client.settings.noise.prototype_noise
        if kind == "none":
            return upload
        entries = dict(upload.entries)
        for name, value in entries.items():
            if isinstance(value, Prototypes):
                seed = self.client.seed_for("prototype-noise", self.client.instructions.round, name)
                entries[name] = self.post_processed(noised_prototypes, value, kind, seed)
        return Payload(**entries)
