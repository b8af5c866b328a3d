"""Differential privacy of a client's messages: steps, tables of classes and figures with noise, all from one ledger.

A ledger, on the client's own disk, has what its messages have cost of its samples' privacy. A site with an operator has
two over all runs, by its name and by its data, which ``require-dp`` in its node config bounds: neither another name nor
a copy of the data is new. A simulated client has one for each run. A repeated message is charged twice.
"""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from client_app.audit import FILE, START, entries
from client_app.client import Client
from client_app.evaluation import Evaluation
from client_app.protections.base import Protection
from client_app.protections.private_step import PrivateStep
from client_app.state import LedgerError, record_in
from client_app.training import Step
from protofl_common.basics.files import digest, locked, write_text
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import Settings
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes, class_means
from protofl_common.privacy import release
from protofl_common.privacy.plan import Mechanism, Plan, epsilon
from protofl_common.privacy.release import fresh_draw
from protofl_common.wire.records import Report

Spending = Counter[tuple[float, float]]  # (q, σ) -> how many times
Ledger = dict[str, Spending]  # By run and Flower run: a server may change either, and what either has spent counts


class DifferentialPrivacy(Protection):
    """``dp = "sample"``: each message is charged to the ledger before a model is trained or evaluated for it.

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
        return settings.privacy.dp != "none"

    def charge(self) -> None:
        asked, plan = self.client.instructions, self._plan
        costs = plan.of_round(asked.round, self.client.evaluates) if self.client.trains_now else plan.of_evaluation()
        charge(self.client, asked.run_name, costs)

    def evaluation(self, evaluation: Evaluation, samples: int) -> Evaluation:
        """Add noise to the numbers of right predictions, and drop all other figures."""
        return Evaluation(release.private_hits(evaluation.correct, samples, self._plan.figure_noise, fresh_draw()))

    def step(self, step: Step) -> Step:
        return PrivateStep.of(step, self._plan)

    def report(self, report: Report) -> Report:
        """Drop losses, and seconds: a model can be made slow for inputs of one kind."""
        return replace(report, losses={}, seconds={})

    # -- what an algorithm's base asks ---------------------------------------------------------------------------
    def class_means(self, features_ND: Tensor, labels_N: Tensor, round_number: int) -> Prototypes:
        """The class means of training samples as they may be sent; each call is a table of the ledger."""
        if self.client.plan is None:
            return class_means(features_ND, labels_N, self.client.num_classes)
        clip, noise = self.client.settings.privacy.dp_feature_clip, self._table_noise(round_number)
        return release.private_class_means(features_ND, labels_N, self.client.num_classes, clip, noise, fresh_draw())

    def class_counts(self, labels_N: Tensor, round_number: int) -> Tensor:
        """[C] int64: the samples of each class as they may be sent; each call is a table of the ledger."""
        counts_C = labels_N.bincount(minlength=self.client.num_classes)
        if self.client.plan is None:
            return counts_C
        return release.private_counts(counts_C, self._table_noise(round_number), fresh_draw())

    def measure(self, moments: ClassMoments, features_NF: Tensor, labels_N: Tensor, round_number: int) -> None:
        """Set ``moments`` to those of training samples as they may be sent; each call is a table of the ledger."""
        if self.client.plan is None:
            moments.measure(features_NF, labels_N)
            return
        clip, noise = self.client.settings.privacy.dp_feature_clip, self._table_noise(round_number)
        release.private_moments(moments, features_NF, labels_N, clip, noise, fresh_draw())

    def check_training(self, step: Step, as_charged: bool) -> None:
        """SettingsError for a second training, for steps that are not private, and for more or larger batches."""
        trained_before, self.has_trained = self.has_trained, True
        self.check_covered(isinstance(step, PrivateStep) and as_charged and not trained_before)

    def check_answer(self) -> None:
        """SettingsError unless a round's answer is of private training or, in one shot, of a table with noise."""
        self.check_covered(self.tables_made > 0 if self.client.settings.row.one_shot else self.has_trained)

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


def ledgers_of(client: Client, run_name: str) -> list[Path]:
    """The files of a client's ledgers; a site's name and its data have one each, in which what either spent counts."""
    if not client.node.is_site:
        return [client.own_file(run_name, "privacy.json")]
    folder = client.settings.data.data_dir and str(Path(client.settings.data.data_dir).expanduser().resolve())
    owners = client.name, digest(folder, client.node.domain, client.node.partition)
    return [client.root / "privacy" / f"{owner}.json" for owner in owners]


def charge(client: Client, run_name: str, costs: Sequence[Mechanism]) -> None:
    """Enter the cost of an answer; SettingsError beyond ``dp-epsilon``, or what this site lets all runs spend."""
    files, privacy, run_id = ledgers_of(client, run_name), client.settings.privacy, f" {client.run_id}"
    try:
        with locked(files[0].with_name("ledgers")):  # another run's client may be at work on this machine
            ledgers = {file: read_ledger(file) for file in files}
            for ledger in ledgers.values():
                ledger.setdefault(run_name + run_id, Counter()).update(_spending(costs))
                own = [ledger[key] for key in ledger if key.rpartition(" ")[0] == run_name or key.endswith(run_id)]
                _check(sum(own, Counter()), privacy.dp_epsilon, privacy.dp_delta, "dp-epsilon")
                _check_all_runs(client, sum(ledger.values(), Counter()))
            for file, ledger in ledgers.items():
                rows = {name: [[*key, times] for key, times in used.items() if times] for name, used in ledger.items()}
                write_text(file, json.dumps(rows) + "\n", private=True)
            if client.node.is_site:
                with record_in(files[0].with_suffix(".answered"), "how often ledgers were charged") as answers:
                    answers.setdefault("charged", {}).update({file.name: _times(of) for file, of in ledgers.items()})
    except OSError as error:
        raise LedgerError(f"the privacy ledger {files[0]} cannot be written: {error}") from error


def check_affordable(client: Client) -> None:
    """SettingsError, before the first round, where not even one fits in what this site lets all runs spend."""
    if client.plan is not None and client.node.required_dp is not None:
        for file in ledgers_of(client, ""):
            _check_all_runs(client, sum(read_ledger(file).values(), _spending(client.plan.of_round(1, True))))


def spent(file: Path, delta: float) -> float:
    """Return ε at ``delta`` of all that a ledger contains."""
    return _epsilon(sum(read_ledger(file).values(), Counter()), delta)


def read_ledger(file: Path) -> Ledger:
    """Return what a ledger contains, nothing where there is no file; LedgerError where it cannot be read."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return {name: Counter({(rate, noise): times for rate, noise, times in used}) for name, used in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LedgerError(f"the privacy ledger {file} cannot be read ({error}): what was spent is not known") from error


def lacking(root: Path, name: str, *, marks: bool = False) -> str:
    """Say what a lost or older ``privacy/`` lacks: rounds that are in the audit log, charges to ledgers; "" for none.

    The record of answers has the charges and, with ``marks``, how far the log was compared with it, and the hash there.
    """
    log, file, last = root / "sites" / name / FILE, root / "privacy" / f"{name}.answered", dict[tuple[str, int], int]()
    with record_in(file, "what was sent") if file.exists() else nullcontext({}) as answers:  # type: ignore[attr-defined]
        size, (at, head) = log.stat().st_size if log.exists() else 0, answers.get("compared", (0, START))
        lines = [*entries(log, at, head)] if size > at else []
        if size < at or (lines and lines[0][2]):  # it is another log
            lines = [*entries(log)] if size else []
        for _, row, _ in lines:
            if (kind := row.get("kind")) in ("train", "evaluate") and "sent" in row and type(row.get("round")) is int:
                last[f"{row.get('run')} {row.get('algo')}", int(kind != "train")] = max(1, row["round"])
        lost = [f"{key} round {n}" for (key, which), n in last.items() if answers.get(key, (0, 0))[which] < n]
        for ledger, times in answers.get("charged", {}).items():
            lost += [f"charges to {ledger}"] * (_times(read_ledger(file.with_name(ledger))) < times)
        if marks and not lost:
            answers["compared"] = size, lines[-1][0] if lines else head
    why = f"lacks what is on record ({', '.join(dict.fromkeys(lost))}); see Backup and restore in docs/operations.md"
    return f"state-dir: {file.parent} {why}" if lost else ""


def _check_all_runs(client: Client, used: Spending) -> None:
    if client.node.required_dp is not None:
        if lost := lacking(client.root, client.name, marks=True):
            raise LedgerError(lost)
        cure = "; what earlier runs spent does not come back: a run of smaller dp-epsilon may still fit"
        _check(used, *client.node.required_dp, "require-dp, over all runs,", cure)


def _check(used: Spending, most: float, delta: float, what: str, cure: str = "") -> None:
    if (brought := _epsilon(used, delta)) > most:
        would = f"this message would bring this client to ε = {brought:.3g} (δ = {delta:g})"
        raise SettingsError(f"{what} = {most:g}: {would}{cure}")


def _epsilon(used: Spending, delta: float) -> float:
    return epsilon([Mechanism(*key, times) for key, times in used.items()], delta)


def _times(ledger: Ledger) -> int:
    return sum(used.total() for used in ledger.values())


def _spending(costs: Sequence[Mechanism]) -> Spending:
    return sum((Counter({(rate, noise): times}) for rate, noise, times in costs), Counter())
