"""Differential privacy of a client's messages: noise on steps, tables and figures, and its price.

What it covers leaves as arrays that `Released` knows (`protofl_common/privacy/released.py`): the
steps and tables here enter what they have made, and an upload with any other array is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from client_app.learning.evaluation import Evaluation
from client_app.learning.sample_use import SampleUse
from client_app.learning.training import Step
from client_app.protections.base import Protection
from client_app.protections.private_step import PrivateStep
from client_app.site.client import Client
from client_app.site.ledger_audit import answers_file, missing_records
from client_app.site.privacy_ledger import (
    Ledger,
    Spending,
    charges_in,
    epsilon_of,
    ledgers_of,
    read_ledger,
    spending_of,
    spent_by,
    total,
    unit_of,
    write_ledger,
)
from client_app.site.record import LedgerError, record_in
from client_app.site.workshop import Workshop
from protofl_common.basics.files import locked
from protofl_common.config.options import SettingsError
from protofl_common.experiment.node import PrivacyLimits
from protofl_common.experiment.settings import Settings
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes
from protofl_common.privacy import release
from protofl_common.privacy.plan import Mechanism, Plan
from protofl_common.privacy.release import fresh_draw
from protofl_common.privacy.released import Released
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report


class DifferentialPrivacy(Protection, SampleUse):
    """``dp``: a message is charged to the client's ledgers before a model trains or is evaluated.

    ``dp`` says whether a sample or a person is protected (`privacy/persons.py`). As a `SampleUse`
    it adds noise to an algorithm's tables of classes and sees its training begin, so that it can
    refuse, by SettingsError, what was not charged. ``post_processed`` is that of `Protection`, as
    the order of bases says.
    """

    name = "differential privacy"

    def __init__(self, work: Workshop, released: Released | None = None) -> None:
        super().__init__(work, released)
        self.has_trained = False
        self.epsilon = 0.0  # of all that the ledger has for this run
        self.evaluations: list[Evaluation] = []  # with noise, of this message

    @staticmethod
    def acts(settings: Settings, is_site: bool) -> bool:
        return settings.privacy.dp != "none"

    def charge(self) -> None:
        """Charge the ledgers for the whole answer, and allow the release of what was paid for.

        A message that is repeated is charged again.
        """
        plan = self._plan
        number = self.client.instructions.round
        costs = plan.costs_of_evaluation()
        if self.client.trains_now:
            costs = plan.costs_of_round(number, self.client.evaluates)
        self.epsilon = charge_ledgers(self.client, self.client.instructions.run_name, costs)
        if self.client.trains_now:
            self._released.allow("table", plan.tables[number - 1])
            self._released.allow("step", plan.steps)
        if self.client.evaluates:
            # of test and validation part, which cost no more than one: no sample is in both
            self._released.allow("evaluation", 2)

    def step(self, step: Step) -> Step:
        return PrivateStep(
            **vars(step), plan=self._plan, released=self._released, persons=self.work.persons
        )

    def upload(self, upload: Payload) -> Payload:
        """Refuse arrays that are not released. Nothing changes the upload after this protection."""
        self._released.check_entries(upload.entries)
        return upload

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        """Return an evaluation with noisy numbers of right predictions and no other figure.

        It is also noted in `evaluations`, as `report` lets only noted numbers leave. SettingsError
        for more evaluations than the ledger was charged for.
        """
        if evaluation.correct:
            self._released.use("evaluation")
        noise = self._plan.figure_noise
        part = self._plan.part_of_each  # of the deviation; below 1 where sites of a sum share it
        noisy_correct = release.private_correct(
            evaluation.correct, samples, noise, fresh_draw(), part
        )
        noisy = Evaluation(noisy_correct)
        self.evaluations.append(noisy)
        return noisy

    def report(self, report: Report) -> Report:
        """Return the report with ε and without losses and seconds.

        SettingsError for figures that `evaluation` has not given noise, and for other metrics.
        Seconds tell of samples: a server can send a model that is slow for inputs of one kind.
        Where sites share noise, no validation figures leave either: a site that has no such samples
        would add no noise to them.
        """
        samples = report.validation_samples
        tested = [evaluation.correct for evaluation in self.evaluations]
        validated = [evaluation.accuracies(samples) for evaluation in self.evaluations]
        has_noise = report.correct in tested and report.validation in validated
        self._released.check(has_noise and not report.metrics)
        shares_noise = self.client.settings.privacy.dp_honest_sites > 1
        validation = {} if shares_noise else report.validation
        return replace(report, losses={}, seconds={}, validation=validation, epsilon=self.epsilon)

    # -- how an algorithm uses samples --------------------------------------------------------
    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Enter ``modules`` as released; no sample has been used for this message yet."""
        self._released.add([*modules])

    def begin_training(self, step: Step, as_charged: bool) -> None:
        """Refuse a second training for this message, and a step without noise: SettingsError.

        ``as_charged`` is False where the batches are more or larger than those of the ledger's
        charge, which is refused as well.
        """
        is_first = not self.has_trained
        self.has_trained = True
        self._released.check(isinstance(step, PrivateStep) and as_charged and is_first)

    def class_means(self, features_ND: Tensor, labels_N: Tensor, num_classes: int) -> Prototypes:
        """Return noisy class means of one row of each person, cut to ``dp-feature-clip``.

        They may leave then. SettingsError for more tables than the ledger was charged for.
        """
        clip = self.client.settings.privacy.dp_feature_clip
        noise = self._noise_of_next_table()
        rows_P = self._one_of_each(labels_N)
        prototypes = release.private_class_means(
            features_ND[rows_P], labels_N[rows_P], num_classes, clip, noise, fresh_draw()
        )
        self._released.add(prototypes)
        return prototypes

    def class_counts(self, labels_N: Tensor, num_classes: int) -> Tensor:
        """Return counts [C] of one sample of each person with noise, and permit them to leave.

        Raises SettingsError for more tables than the ledger was charged for.
        """
        rows_P = self._one_of_each(labels_N)
        counts_C = super().class_counts(labels_N[rows_P], num_classes)
        noisy_C = release.private_counts(counts_C, self._noise_of_next_table(), fresh_draw())
        self._released.add(noisy_C)
        return noisy_C

    def measure(
        self,
        moments: ClassMoments,
        features_NF: Tensor,
        labels_N: Tensor,
        samples: int | None = None,
    ) -> None:
        """Set ``moments`` to the noisy ones of one row of each person; they may leave then.

        Rows are cut to ``dp-feature-clip``. SettingsError for more tables than the ledger was
        charged for.
        """
        if samples not in (None, len(labels_N)):
            raise SettingsError(f"{len(labels_N)} classes of {samples} samples; dp takes one each")
        clip = self.client.settings.privacy.dp_feature_clip
        noise = self._noise_of_next_table() * self._plan.part_of_each
        rows_P = self._one_of_each(labels_N)
        release.private_moments(
            moments, features_NF[rows_P], labels_N[rows_P], clip, noise, fresh_draw()
        )
        self._released.add(moments)

    def check_answer(self, modules: Iterable[nn.Module], upload: Payload) -> None:
        """Refuse a round's answer that is not what the ledger was charged for: SettingsError.

        An algorithm that is not one-shot must have trained, with all tables made that were charged.
        Every array of the upload must be released. Each of the algorithm's ``modules`` must be as
        it was received, or as private steps have left it, as the next evaluation shows what it has
        learned.
        """
        released = self._released
        released.check(self.has_trained or self.client.settings.row.one_shot)
        released.check_entries(upload.entries)
        released.check(released.covers([*modules]))
        released.check(released.unused["table"] == 0)

    @property
    def _plan(self) -> Plan:
        assert self.work.plan is not None
        return self.work.plan

    @property
    def _released(self) -> Released:
        assert self.released is not None
        return self.released

    def _one_of_each(self, labels_N: Tensor) -> Tensor:
        """Draw one row of each person, [P]; SettingsError unless labels are of all samples."""
        persons = self.work.persons
        self._released.check(persons.samples == len(labels_N))
        return torch.from_numpy(persons.one_of_each(fresh_draw()))

    def _noise_of_next_table(self) -> float:
        """Count a table as made, and return the σ of its noise.

        SettingsError where the ledger was charged for fewer tables.
        """
        self._released.use("table")
        return self._plan.table_noise


def charge_ledgers(client: Client, run_name: str, costs: Sequence[Mechanism]) -> float:
    """Enter the cost of an answer in the client's ledgers, and return the ε of the run so far.

    Nothing is entered if an error is raised. SettingsError beyond ``dp-epsilon``, beyond what this
    site lets all runs spend, and under ``dp = "person"`` where samples were charged before.
    LedgerError where a ledger cannot be used, or is not complete.
    """
    files = ledgers_of(client, run_name)
    privacy = client.settings.privacy
    limits = PrivacyLimits(privacy.dp_epsilon, privacy.dp_delta, privacy.dp)
    epsilon = 0.0
    try:
        # one lock for all ledgers of the folder: clients of other runs may be at work here, too
        with locked(files[0].with_name("ledgers")):
            ledgers = {file: read_ledger(file) for file in files}
            for ledger in ledgers.values():
                entry = ledger.setdefault(f"{run_name} {client.run_id}", Spending())
                entry.update(spending_of(costs, privacy.dp))  # a counter's update adds
                spent_by_run = spent_by(ledger, run_name, client.run_id)
                epsilon = max(epsilon, _check(spent_by_run, limits, "dp-epsilon"))
                _check_all_runs(client, total(ledger))
            # nothing is written before all ledgers have passed
            for file, ledger in ledgers.items():
                write_ledger(file, ledger)
            if client.node.is_site:
                _record_charges(answers_file(client.root, client.name), ledgers)
    except OSError as error:
        raise LedgerError(f"the privacy ledger {files[0]} cannot be written: {error}") from error
    return epsilon


def _record_charges(file: Path, ledgers: Mapping[Path, Ledger]) -> None:
    """Write into the record of answers how often each ledger was charged.

    An older copy of a ledger is recognised by it later (`missing_records`).
    """
    charges = {ledger_file.name: charges_in(ledger) for ledger_file, ledger in ledgers.items()}
    with record_in(file, "how often ledgers were charged") as answers:
        answers.setdefault("charged", {}).update(charges)


def check_affordable(work: Workshop) -> None:
    """Refuse with SettingsError a run whose first round is more than this site lets all runs spend.

    Without ``require-dp`` in its node config nothing is checked.
    """
    client = work.client
    if work.plan is None or client.node.required_dp is None:
        return
    costs = work.plan.costs_of_round(1, evaluates=True)
    first_round = spending_of(costs, client.settings.privacy.dp)
    for file in ledgers_of(client, ""):  # a site's ledgers are the same for all runs
        _check_all_runs(client, total(read_ledger(file)) + first_round)


def _check_all_runs(client: Client, spending: Spending) -> None:
    """Refuse with SettingsError what makes all runs together spend more than ``require-dp``.

    LedgerError where the site's records are not complete, so that more was spent. Without
    ``require-dp`` nothing is checked.
    """
    if client.node.required_dp is None:
        return
    lost = missing_records(client.root, client.name)
    if lost:
        raise LedgerError(lost)
    limits = client.node.required_dp
    if client.settings.privacy.dp == "person":
        # then the limit is one for each person, even if the operator wrote it for samples: earlier
        # charges for samples do not say what a person has lost, so `_check` refuses after such
        limits = limits._replace(unit="person")
    cure = "; what earlier runs spent does not come back: a run of smaller dp-epsilon may still fit"
    _check(spending, limits, "require-dp, over all runs,", cure)


def _check(spending: Spending, limits: PrivacyLimits, what: str, cure: str = "") -> float:
    """Return the ε of what is spent.

    SettingsError above the limit, or where the limit is for a person and some noise was for a
    sample. The text calls the limit ``what`` and ends in ``cure``.
    """
    if limits.unit == "person" and unit_of(spending) == "sample":
        raise SettingsError(
            f"{what} = {limits.epsilon:g}: earlier charges in this client's ledger are of samples,"
            " and what they cost a person is not known (docs/privacy.md)"
        )
    epsilon = epsilon_of(spending, limits.delta)
    if epsilon > limits.epsilon:
        raise SettingsError(
            f"{what} = {limits.epsilon:g}: this message would bring this client to"
            f" ε = {epsilon:.3g}{limits.per_unit} (δ = {limits.delta:g}){cure}"
        )
    return epsilon
