"""The rows of ``metrics.jsonl``, one for each round, and ``summary.json`` at the end."""

import os
import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from typing import TypeVar, cast

from protofl_common.basics.code_version import code_version, commit, machine
from protofl_common.basics.tensorfile import write_tensors
from protofl_common.basics.text import in_order
from protofl_common.config.datasets import PARTITIONS, is_own
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError
from protofl_common.data.store import files_key
from protofl_common.experiment.node import own_code
from protofl_common.experiment.settings import to_run_config
from protofl_common.privacy.sums import Means
from protofl_common.runs.figures import epsilon_of_ledgers, totals
from protofl_common.runs.folder import (
    METRICS,
    NEW,
    SUMMARY,
    Accuracies,
    Best,
    ClientRow,
    RoundRow,
    Summary,
    without_clients,
)
from protofl_common.runs.over_clients import best_of, outcome_warnings, over_clients
from protofl_common.tasks.metrics import KINDS
from protofl_common.wire.records import Report
from protofl_common.wire.schema import vectors_in
from server_app.callbacks.base import ActiveRun, Callback
from server_app.run.checkpoint import CannotResume
from server_app.run.log import say
from server_app.run.replies import RoundResult
from server_app.strategies.base import Strategy

Row = TypeVar("Row", RoundRow, ClientRow)
OPTIONAL = {*RoundRow.__optional_keys__, *ClientRow.__optional_keys__} - {
    "epsilon",
    "epsilon-of",
}
"""Keys that a row leaves out where their value is empty; an ε of 0 stays."""


class Metrics(Callback):
    """Writes a row of ``metrics.jsonl`` after each round."""

    def __init__(self, run: ActiveRun) -> None:
        """In a resumed run, read the rows so far, and cut off those of rounds that do not count.

        These are the rounds after the checkpoint from which the run goes on. Raises CannotResume if
        rows are missing.
        """
        if not run.start.run_history.earlier:  # a new run
            return
        last = run.start.round
        rounds = run.settings.run.rounds
        path = run.folder / METRICS
        if not path.exists() or path.stat().st_size < run.start.metrics_bytes:
            raise CannotResume(f"resume = true: {path} lacks rows of the first {last} rounds")

        os.truncate(path, run.start.metrics_bytes)
        for row in run.files.each_row():
            run.rows.append(without_clients(row))
        run.files.drop_margins_after(last)
        step = f"round {last + 1} is next" if last < rounds else "its final evaluation is next"
        say(f"resuming {run.folder.name} after round {last} of {rounds}; {step}")

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        run.rows.append(without_clients(row))
        run.files.add(METRICS, row)


class Conclusion(Callback):
    """Writes the results, and then the summary: a run that has one is complete."""

    def on_start(self, run: ActiveRun) -> None:
        # noted now, as the user may edit code and data while the run goes on
        self.own_code = own_code(run.settings.given, without=("callback", "metrics"))
        self.own_data = _own_data(run)

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        """Write the global prototypes and weights, if there are any, and then the summary."""
        prototypes = run.strategy.prototypes
        if prototypes is not None:
            arrays = {"means": prototypes.means, "labels": prototypes.labels}
            write_tensors(run.folder / "prototypes.safetensors", arrays, {})
        weights = run.strategy.global_weights
        if weights is not None:
            write_tensors(run.folder / "weights.safetensors", weights, {})
        summary = _summary(run, row, self.own_code, self.own_data)
        run.files.write(SUMMARY, summary, indent=2)


def _own_data(run: ActiveRun) -> str:
    """Return a digest of the user's own data, which is another one after a file was edited.

    "" for other data, and where each site has its own.
    """
    data = run.settings.data
    if not is_own(data.dataset) or not run.federation.simulated:
        return ""
    try:
        return files_key(data)
    except (DataError, SettingsError, OSError):
        return ""


def row_of(
    result: RoundResult, strategy: Strategy, epsilon: float | None, total_seconds: float
) -> RoundRow:
    """Return the line of ``metrics.jsonl`` for a round or the final evaluation.

    ``epsilon`` is what the run costs of privacy by its plan, None without ``dp``. Clients that have
    never trained count neither as asked nor as valid, and their metrics have names of their own.
    """
    federation = strategy.federation
    exchanged = result.exchanged
    new_clients = federation.new_clients if result.final else set()
    reports = {
        site: _of_new_client(report) if site in new_clients else report
        for site, report in result.reports.items()
    }
    liars = federation.bounds.liars
    seconds_of_clients = _sums([report.seconds for report in reports.values()])
    row: RoundRow = {
        "kind": "final" if result.final else "round",
        "round": result.number,
        # in a round clients evaluate what they receive, before they train
        "evaluated-after-round": result.number if result.final else result.number - 1,
        "accuracy": {},
        "losses": {},
        "bytes": {"up": exchanged.bytes_up, "down": exchanged.bytes_down},
        "asked": len(set(exchanged.asked) - new_clients),
        "valid": len(reports.keys() - new_clients),
        "void": bool(result.not_merged),
        "failed": exchanged.failed,
        "refused": result.refused,
        "missing": exchanged.missing,
        "unused": result.unused,
        "late": {
            site: text for site, text in exchanged.late.items() if site not in result.counted_late
        },
        "counted-late": result.counted_late,
        "clients": _client_rows(result, reports, strategy),
        "seconds": {"total": total_seconds, **result.seconds, "clients": seconds_of_clients},
        "metrics": {},
        "validation": {},
        "void-because": result.not_merged,
        "bounded": in_order(result.reduced),
        "server": result.server_figures,
        "liars": liars,
    }
    if exchanged.means is None:
        _put_figures_of_clients(row, reports.values(), liars)
    else:  # secure aggregation hid the clients' own figures
        _put_figures_of_samples(row, exchanged.means)
    if epsilon is not None:
        row["epsilon"] = epsilon
        row["epsilon-of"] = strategy.settings.privacy.dp
    return _without_empty(row)


def _without_empty(row: Row) -> Row:
    """Return the row without the `OPTIONAL` keys whose values are empty."""
    return cast(Row, {key: value for key, value in row.items() if value or key not in OPTIONAL})


def _summary(run: ActiveRun, final: RoundRow, own_code: dict[str, str], own_data: str) -> Summary:
    """Return the content of ``summary.json``.

    ``final`` is the row of the final evaluation. ``own_code`` has the version of each module of the
    user's own, and ``own_data`` is the digest of the user's own data (`_own_data`).
    """
    settings = run.settings
    rounds = [row for row in run.rows if row["kind"] == "round"]
    bytes_of_run, lost_replies, _ = totals(run.rows)

    best_accuracy: dict[str, Best] = {}
    for kind in final["accuracy"]:
        best = best_of(run.rows, kind)
        if best:
            best_accuracy[kind] = best

    versions = {"protofl": code_version(), "python": platform.python_version()}
    for package in ("flwr", "torch", "numpy"):
        versions[package] = version(package)
    versions.update(own_code)

    summary: Summary = {
        "algorithm": run.strategy.row.title,
        "dataset": settings.data.dataset,
        "partition": settings.data.partition,
        "division": PARTITIONS[settings.data.partition].version,
        "clients": {
            site: {"arch": card.arch, "domain": card.domain, "parameters": card.parameters}
            for site, card in run.federation.cards.items()
        },
        "rounds": len(rounds),
        "accuracy": final["accuracy"],
        "best-accuracy": best_accuracy,
        "best-round": run.best,
        "stopped-early": len(rounds) < settings.run.rounds,
        "metrics": final.get("metrics", {}),
        "validation": final.get("validation", {}),
        "accuracy-of-clients": {
            site: client["accuracy"] for site, client in final["clients"].items()
        },
        "bytes": bytes_of_run,
        "trouble": lost_replies,
        "bounded": in_order(set(chain(*(row.get("bounded", []) for row in run.rows)))),
        "warnings": list(
            outcome_warnings(
                run.rows,
                final,
                run.files.sites(),
                settings.run.metrics,
                settings.privacy.min_class_samples,
            )
        ),
        "void-rounds": sum(row["void"] for row in rounds),
        "resumed-after-rounds": [last for _, last in run.start.run_history.earlier],
        "ended": time.time(),
        "seconds": time.monotonic() - run.began,
        "seconds-per-round": sum(row["seconds"]["total"] for row in rounds) / max(1, len(rounds)),
        "versions": versions,
        "commit": commit(),
        "machine": machine(),
        "settings": to_run_config(settings),
    }
    if "epsilon" in final:
        summary = {"epsilon": final["epsilon"], **summary}
    of_ledgers = epsilon_of_ledgers(final)
    if of_ledgers is not None:
        summary["epsilon-of-ledgers"] = of_ledgers
    if own_data:
        summary["data"] = own_data
    return summary


def _client_rows(
    result: RoundResult, reports: Mapping[str, Report], strategy: Strategy
) -> dict[str, ClientRow]:
    """Return the row of each site.

    Where sites may send several prototypes of a class, it says how many of each class came.
    """
    rows = {site: _client_row(report) for site, report in reports.items()}
    vectors_up = vectors_in(strategy.row.exchange.up).values()
    if not result.final and any(entry.several for entry in vectors_up):
        for site, sent in result.prototypes.items():
            numbers_C = sent.labels.bincount(minlength=strategy.num_classes)
            rows[site]["prototypes-of-classes"] = numbers_C.tolist()
    return rows


def _client_row(report: Report) -> ClientRow:
    """Return a client's figures as they stand in a row of ``metrics.jsonl``."""
    row: ClientRow = {
        "accuracy": _accuracy_of(report),
        "losses": report.losses,
        "seconds": report.seconds,
        "test-samples": report.test_samples,
        "train-samples": report.train_samples,
        "metrics": report.metrics,
        "validation-samples": report.validation_samples,
        "validation": report.validation,
    }
    if report.epsilon is not None:
        row["epsilon"] = report.epsilon
    return _without_empty(row)


def _accuracy_of(report: Report) -> dict[str, float]:
    """Return the client's test accuracy by each kind of prediction (head, prototype)."""
    samples = max(1, report.test_samples)  # lest 0 be divided by 0
    return {kind: right / samples for kind, right in report.correct.items()}


def _of_new_client(report: Report) -> Report:
    """Return the report of a client that has never trained, with its figures renamed.

    Its accuracy ``head`` becomes the metric ``head/new-clients``, so that no mean mixes it with
    those of clients that trained. Figures on validation data are dropped.
    """
    figures = {**_accuracy_of(report), **report.metrics}
    renamed = {name + NEW: figure for name, figure in figures.items()}
    return replace(report, correct={}, metrics=renamed, validation={})


def _put_figures_of_samples(row: RoundRow, means: Means) -> None:
    """Put the means over all samples into a row, where secure aggregation hides single clients.

    The mean over clients is not known then, and the mean over samples stands in its place.
    """

    def both(group: str) -> Accuracies:
        return {name: {"mean": mean, "weighted": mean} for name, mean in means[group].items()}

    row["accuracy"] = both("correct")
    row["losses"] = means["losses"]
    row["metrics"] = both("metrics")
    row["validation"] = both("validation")


def _put_figures_of_clients(row: RoundRow, reports: Collection[Report], liars: int) -> None:
    """Put the figures over the clients that report them into a row; ``liars`` may lie."""
    tested = [(report.metrics, report.test_samples) for report in reports]
    validated = [(report.validation, report.validation_samples) for report in reports]
    row["accuracy"] = _accuracy_over_clients(reports, liars)
    row["losses"] = _mean_losses(reports)
    row["metrics"] = _over_clients(tested, liars)
    row["validation"] = _over_clients(validated, liars)


def _accuracy_over_clients(reports: Collection[Report], liars: int) -> Accuracies:
    """Summarise the clients' accuracies, one summary for each of the `KINDS` of prediction.

    A kind that only liars may have reported is left out. Clients without test samples do not count.
    """
    tested = [report for report in reports if report.test_samples]
    accuracies = [(_accuracy_of(report), report.test_samples) for report in tested]
    accuracy = _over_clients(accuracies, liars)
    reporters = {kind: sum(kind in report.correct for report in tested) for kind in accuracy}

    def may_be_invented(kind: str) -> bool:
        """True if all that report this kind may be liars, and enough others report another one."""
        return reporters[kind] <= liars < max(reporters.values())

    return {
        kind: accuracy[kind] for kind in KINDS if kind in accuracy and not may_be_invented(kind)
    }


def _mean_losses(reports: Collection[Report]) -> dict[str, float]:
    """Return the mean of each loss over the clients that trained, weighted by training samples."""
    trained = [report for report in reports if report.losses]
    total = sum(report.train_samples for report in trained)
    addends = []
    for report in trained:
        samples = report.train_samples
        addends.append({name: loss * samples / total for name, loss in report.losses.items()})
    return _sums(addends)


def _over_clients(clients: list[tuple[dict[str, float], int]], liars: int) -> Accuracies:
    """Summarise each figure over the clients that report it (`over_clients`).

    ``clients`` has for each client its figures, and on how many samples they were measured.
    """
    values: dict[str, list[float]] = {}
    samples: dict[str, list[int]] = {}
    for figures, number in clients:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
            samples.setdefault(name, []).append(number)
    return {name: over_clients(values[name], samples[name], liars) for name in values}


def _sums(tables: list[dict[str, float]]) -> dict[str, float]:
    """Return the sum over the tables of each key's values; a missing one counts 0."""
    keys = dict.fromkeys(chain(*tables))
    return {key: sum(table.get(key, 0.0) for table in tables) for key in keys}
