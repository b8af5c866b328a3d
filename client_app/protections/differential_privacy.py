"""Differential privacy of a client's messages: steps, tables of classes and figures with noise, all from one ledger."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from client_app.client import Client
from client_app.evaluation import Evaluation
from client_app.protections.base import Protection
from client_app.protections.ledger import charge
from client_app.protections.private_step import PrivateStep
from client_app.training import Step
from protofl_common.config.options import SettingsError
from protofl_common.data.raw import Ints
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import Prototypes, class_means
from protofl_common.privacy.plan import Plan
from protofl_common.privacy.release import fresh_draw, private_class_means, private_counts, private_hits
from protofl_common.wire.records import Instructions, Report


class DifferentialPrivacy(Protection):
    """``dp = "sample"``: each message is charged to the ledger before any sample is read for it.

    An algorithm's base makes its tables of classes and begins its training here, so what the ledger does not cover is
    refused. Without ``dp`` these are the exact ones.
    """

    name = "differential privacy"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.has_trained = False
        self.tables_made = 0

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        """With any ``dp``."""
        return settings.privacy.dp != "none"

    def before(self, instructions: Instructions, training: bool) -> None:
        """Charge the ledger."""
        charge(self.client, instructions, trains=training)

    def evaluation(self, evaluation: Evaluation, labels_N: Ints) -> Evaluation:
        """Add noise to the numbers of right predictions, and drop all other figures."""
        noise = self._plan.figure_noise
        return Evaluation(private_hits(evaluation.correct, len(labels_N), noise, fresh_draw()))

    def step(self, step: Step) -> Step:
        """DP-SGD's, on the same loss and with the same correction."""
        return PrivateStep(step.modules, step.optimizer, step.loss, self._plan, step.correction)

    def report(self, report: Report) -> Report:
        """Drop losses, and seconds: a model can be made slow for inputs of one kind."""
        return replace(report, losses={}, seconds={})

    # -- what an algorithm's base asks ---------------------------------------------------------------------------

    def class_means(self, features_ND: Tensor, labels_N: Tensor, round_number: int) -> Prototypes:
        """The class means of training samples as they may be sent; each call is a table of the ledger."""
        if self.client.plan is None:
            return class_means(features_ND, labels_N, self.client.num_classes)
        clip, noise = self.client.settings.privacy.dp_feature_clip, self._table_noise(round_number)
        return private_class_means(features_ND, labels_N, self.client.num_classes, clip, noise, fresh_draw())

    def class_counts(self, labels_N: Tensor, round_number: int) -> Tensor:
        """[C] int64: the samples of each class as they may be sent; each call is a table of the ledger."""
        counts_C = labels_N.bincount(minlength=self.client.num_classes)
        if self.client.plan is None:
            return counts_C
        return private_counts(counts_C, self._table_noise(round_number), fresh_draw())

    def check_training(self, step: Step, as_charged: bool) -> None:
        """SettingsError for a second training, for steps that are not private, and for more or larger batches."""
        covered = isinstance(step, PrivateStep) and as_charged and not self.has_trained
        self.has_trained = True
        self.check_covered(covered)

    def check_covered(self, covered: bool) -> None:
        """SettingsError under differential privacy, unless the ledger covers what this client is about to do."""
        if self.client.plan is not None and not covered:
            does = f"{self.client.settings.run.algo} makes use of training data that the privacy ledger does not cover"
            raise SettingsError(f"dp = 'sample': {does}")

    @property
    def _plan(self) -> Plan:
        assert self.client.plan is not None
        return self.client.plan

    def _table_noise(self, round_number: int) -> float:
        """σ of a further table; SettingsError where the ledger was charged for fewer."""
        self.tables_made += 1
        self.check_covered(self.tables_made <= self._plan.tables[round_number - 1])
        return self._plan.table_noise
