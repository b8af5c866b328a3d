"""Differential privacy of a client's messages: steps, tables of classes and figures with noise, all from one ledger.

What it covers leaves as arrays that `Released` knows (`protofl_common/privacy/released.py`): the steps and tables here
enter what they have made, and an upload with any other array is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from client_app.client import Client
from client_app.evaluation import Evaluation
from client_app.ledger_audit import lacking
from client_app.privacy_ledger import (
    Spending,
    charges_in,
    epsilon_of,
    ledgers_of,
    read_ledger,
    spending_of,
    spent_by,
    total,
    write_ledger,
)
from client_app.protections.base import Protection
from client_app.protections.private_step import PrivateStep
from client_app.state import LedgerError, record_in
from client_app.training import Step
from protofl_common.basics.files import locked
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import Settings
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes, class_means
from protofl_common.privacy import release
from protofl_common.privacy.plan import Mechanism, Plan
from protofl_common.privacy.release import fresh_draw
from protofl_common.privacy.released import Released
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report


class DifferentialPrivacy(Protection):
    """``dp = "sample"``: each message is charged to the ledger before a model is trained or evaluated for it.

    An algorithm's base makes its tables of classes and begins its training here, so what the ledger does not cover is
    refused. Without ``dp`` these are the exact ones.
    """

    name = "differential privacy"

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.has_trained = False
        self.evaluations: list[Evaluation] = []

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return settings.privacy.dp != "none"

    def charge(self) -> None:
        """Charge the ledger, and allow what it was charged for; a repeated message is charged twice."""
        asked, plan = self.client.instructions, self._plan
        if self.client.trains_now:
            evaluates = self.client.evaluates
            costs, tables = plan.of_round(asked.round, evaluates), plan.tables[asked.round - 1]
            steps = plan.steps
        else:
            evaluates, costs, tables, steps = True, plan.of_evaluation(), 0, 0
        charge(self.client, asked.run_name, costs)
        parts = 2 if evaluates else 0  # a sample is a test or a validation sample, so both parts cost as much as one
        self._released.charge(tables=tables, steps=steps, evaluations=parts)

    def step(self, step: Step) -> Step:
        return PrivateStep.of(step, self._plan, self._released)

    def upload(self, upload: Payload) -> Payload:
        """Refuse arrays that are not released. Nothing changes the upload after this protection."""
        self._released.check_entries(upload.entries)
        return upload

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        """Add noise to the numbers of right predictions, and drop all other figures."""
        if evaluation.correct:
            self._released.use_evaluation()
        noise = self._plan.figure_noise
        noisy = Evaluation(release.private_hits(evaluation.correct, samples, noise, fresh_draw()))
        self.evaluations.append(noisy)
        return noisy

    def report(self, report: Report) -> Report:
        """Drop losses, and seconds: a model can be made slow for inputs of one kind. Refuse figures without noise."""
        samples = report.validation_samples
        tested = [evaluation.correct for evaluation in self.evaluations]
        validated = [evaluation.accuracies(samples) for evaluation in self.evaluations]
        has_noise = report.correct in tested and report.validation in validated
        self.check_covered(has_noise and not report.metrics)
        return replace(report, losses={}, seconds={})

    # -- what an algorithm's base asks ---------------------------------------------------------------------------
    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Let ``modules`` leave as they are now: no sample has had a part in them but through earlier messages."""
        if self.client.released is not None:
            self.client.released.add([*modules])

    def class_means(self, features_ND: Tensor, labels_N: Tensor) -> Prototypes:
        """The class means of training samples as they may be sent; each call is a table of the ledger."""
        num_classes = self.client.num_classes
        if self.client.released is None:
            return class_means(features_ND, labels_N, num_classes)
        clip = self.client.settings.privacy.dp_feature_clip
        noise = self._table_noise()
        prototypes = release.private_class_means(
            features_ND, labels_N, num_classes, clip, noise, fresh_draw()
        )
        self.client.released.add(prototypes)
        return prototypes

    def class_counts(self, labels_N: Tensor) -> Tensor:
        """[C] int64: the samples of each class as they may be sent; each call is a table of the ledger."""
        counts_C = labels_N.bincount(minlength=self.client.num_classes)
        if self.client.released is None:
            return counts_C
        noisy_C = release.private_counts(counts_C, self._table_noise(), fresh_draw())
        self.client.released.add(noisy_C)
        return noisy_C

    def measure(self, moments: ClassMoments, features_NF: Tensor, labels_N: Tensor) -> None:
        """Set ``moments`` to those of training samples as they may be sent; each call is a table of the ledger."""
        if self.client.released is None:
            moments.measure(features_NF, labels_N)
            return
        clip = self.client.settings.privacy.dp_feature_clip
        noise = self._table_noise()
        release.private_moments(moments, features_NF, labels_N, clip, noise, fresh_draw())
        self.client.released.add(moments)

    def check_training(self, step: Step, as_charged: bool) -> None:
        """SettingsError for a second training, for steps that are not private, and for more or larger batches."""
        trained_before = self.has_trained
        self.has_trained = True
        self.check_covered(isinstance(step, PrivateStep) and as_charged and not trained_before)

    def check_answer(self, modules: Iterable[nn.Module], upload: Payload) -> None:
        """SettingsError for a round's answer that is not what the ledger was charged for.

        Every array of the upload must be released, as many tables made as were charged, and each of an algorithm's
        ``modules`` as it was at first or as private steps have left it: the next evaluation shows what it has learned.
        """
        released = self.client.released
        if released is None:
            return
        released.check_entries(upload.entries)
        released.check(self.has_trained or self.client.settings.row.one_shot)
        released.check(released.tables_left == 0)
        released.check(released.covers([*modules]))

    def check_covered(self, covered: bool) -> None:
        """SettingsError under differential privacy, unless the ledger covers what this client is about to do."""
        if self.client.released is not None:
            self.client.released.check(covered)

    @property
    def _plan(self) -> Plan:
        assert self.client.plan is not None
        return self.client.plan

    @property
    def _released(self) -> Released:
        assert self.client.released is not None
        return self.client.released

    def _table_noise(self) -> float:
        """σ of a further table; SettingsError where the ledger was charged for fewer."""
        self._released.use_table()
        return self._plan.table_noise


def charge(client: Client, run_name: str, costs: Sequence[Mechanism]) -> None:
    """Enter the cost of an answer; SettingsError beyond ``dp-epsilon``, or what this site lets all runs spend."""
    files = ledgers_of(client, run_name)
    privacy = client.settings.privacy
    try:
        with locked(files[0].with_name("ledgers")):  # another run's client may be at work on this machine
            ledgers = {file: read_ledger(file) for file in files}
            for ledger in ledgers.values():
                ledger.setdefault(f"{run_name} {client.run_id}", Spending()).update(spending_of(costs))
                of_run = spent_by(ledger, run_name, client.run_id)
                _check(of_run, privacy.dp_epsilon, privacy.dp_delta, "dp-epsilon")
                _check_all_runs(client, total(ledger))
            for file, ledger in ledgers.items():
                write_ledger(file, ledger)
            if client.node.is_site:
                with record_in(files[0].with_suffix(".answered"), "how often ledgers were charged") as answers:
                    charges = {file.name: charges_in(ledger) for file, ledger in ledgers.items()}
                    answers.setdefault("charged", {}).update(charges)
    except OSError as error:
        raise LedgerError(f"the privacy ledger {files[0]} cannot be written: {error}") from error


def check_affordable(client: Client) -> None:
    """SettingsError, before the first round, where not even one fits in what this site lets all runs spend."""
    if client.plan is None or client.node.required_dp is None:
        return
    first_round = spending_of(client.plan.of_round(1, True))
    for file in ledgers_of(client, ""):
        _check_all_runs(client, total(read_ledger(file)) + first_round)


def _check_all_runs(client: Client, spending: Spending) -> None:
    if client.node.required_dp is None:
        return
    if lost := lacking(client.root, client.name, marks=True):
        raise LedgerError(lost)
    most, delta = client.node.required_dp
    cure = "; what earlier runs spent does not come back: a run of smaller dp-epsilon may still fit"
    _check(spending, most, delta, "require-dp, over all runs,", cure)


def _check(spending: Spending, most: float, delta: float, what: str, cure: str = "") -> None:
    epsilon = epsilon_of(spending, delta)
    if epsilon > most:
        would = f"this message would bring this client to ε = {epsilon:.3g} (δ = {delta:g})"
        raise SettingsError(f"{what} = {most:g}: {would}{cure}")
