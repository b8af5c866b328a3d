"""The rows of ``metrics.jsonl``, one for each round, and ``summary.json`` at the end."""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from typing import TypeVar, cast

from protofl_common.basics.code_version import code_version, commit, machine
from protofl_common.basics.tensorfile import write_tensors
from protofl_common.basics.text import in_order
from protofl_common.config.datasets import REDIVIDED
from protofl_common.config.options import SettingsError
from protofl_common.experiment.node import own_code
from protofl_common.experiment.settings import to_run_config
from protofl_common.privacy.sums import Means
from protofl_common.runs.figures import totals
from protofl_common.runs.folder import KINDS, METRICS, NEW, SUMMARY, Accuracies, ClientRow, RoundRow, Summary
from protofl_common.runs.over_clients import best_of, doubts_of_outcome, over_clients
from protofl_common.wire.records import Report
from protofl_common.wire.schema import vectors_in
from server_app.callbacks.base import ActiveRun, Callback
from server_app.log import say
from server_app.replies import RoundResult
from server_app.strategies.base import Strategy

Row = TypeVar("Row", RoundRow, ClientRow)
OPTIONAL = {*RoundRow.__optional_keys__, *ClientRow.__optional_keys__} - {"epsilon"}


class Metrics(Callback):
    """Writes the rows as the run goes on; after a resumption it drops those of rounds that do not count."""

    def __init__(self, run: ActiveRun) -> None:
        if not run.start.run_history.earlier:
            return
        start, rounds, path = run.start, run.settings.run.rounds, run.folder / METRICS
        if not path.exists() or path.stat().st_size < start.metrics_bytes:
            raise SettingsError(f"resume = true: {path} lacks rows of the first {start.round} rounds")
        os.truncate(path, start.metrics_bytes)
        run.rows += [{**row, "clients": {}} for row in run.files.each_row()]
        run.files.drop_margins_after(start.round)
        then = f"round {start.round + 1} is next" if start.round < rounds else "its final evaluation is next"
        say(f"resuming {run.folder.name} after round {start.round} of {rounds}; {then}")

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        run.rows.append({**row, "clients": {}})
        run.files.add(METRICS, row)


class Conclusion(Callback):
    """Writes the results, and then the summary: a run that has one is complete."""

    def on_start(self, run: ActiveRun) -> None:
        self.own_code = own_code(run.settings.given, without=("callback", "metrics"))  # which may be edited meanwhile

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        strategy = run.strategy
        if (prototypes := strategy.prototypes) is not None:
            arrays = {"means": prototypes.means, "labels": prototypes.labels}
            write_tensors(run.folder / "prototypes.safetensors", arrays, {})
        if strategy.global_weights is not None:
            write_tensors(run.folder / "weights.safetensors", strategy.global_weights, {})
        run.files.write(SUMMARY, _summary(run, row, self.own_code), indent=2)


def row_of(result: RoundResult, strategy: Strategy) -> RoundRow:
    """Return the line of ``metrics.jsonl`` for a round or the final evaluation."""
    new = strategy.federation.new_clients if result.final else set()
    reports = {site: _of_new_client(report) if site in new else report for site, report in result.reports.items()}
    accuracy, losses, metrics, validation = _figures(reports, result.means, strategy.federation.bounds.liars)
    clients = {site: _client_row(report) for site, report in reports.items()}
    if any(entry.several for entry in vectors_in(strategy.row.exchange.up).values()) and not result.final:
        for site, sent in result.prototypes.items():
            clients[site]["prototypes-of-classes"] = sent.labels.bincount(minlength=strategy.num_classes).tolist()
    row: RoundRow = {
        "kind": "final" if result.final else "round",
        "round": result.number,
        "evaluated-after-round": result.number - (not result.final),
        "accuracy": accuracy,
        "losses": losses,
        "bytes": {"up": result.bytes_up, "down": result.bytes_down},
        "asked": len(set(result.asked) - new),
        "valid": len(reports.keys() - new),
        "void": bool(result.not_merged),
        "failed": result.failed,
        "refused": result.refused,
        "missing": result.missing,
        "late": result.late,
        "clients": clients,
        "seconds": {**result.seconds, "clients": _sums([report.seconds for report in reports.values()])},
        "metrics": metrics,
        "validation": validation,
        "void-because": result.not_merged,
        "bounded": in_order(result.bounded),
        "server": result.server_figures,
        "audit": result.heads,
        "liars": strategy.federation.bounds.liars,
    }
    if result.epsilon is not None:
        row["epsilon"] = result.epsilon
    return _without_empty(row)


def _without_empty(row: Row) -> Row:
    return cast(Row, {key: value for key, value in row.items() if value or key not in OPTIONAL})


def _summary(run: ActiveRun, final: RoundRow, own_code: dict[str, str]) -> Summary:
    rounds = [row for row in run.rows if row["kind"] == "round"]
    sizes, lost, _ = totals(run.rows)
    cards = run.federation.cards.items()
    versions = {"protofl": code_version(), "python": platform.python_version()}
    spent: Summary = {"epsilon": final["epsilon"]} if "epsilon" in final else {}  # type: ignore[typeddict-item]
    return spent | {
        "algorithm": run.strategy.row.title,
        "dataset": run.settings.data.dataset,
        "partition": run.settings.data.partition,
        "division": REDIVIDED.get(run.settings.data.partition, 1),
        "clients": {site: {"arch": of.arch, "domain": of.domain, "parameters": of.parameters} for site, of in cards},
        "rounds": len(rounds),
        "accuracy": final["accuracy"],
        "best-accuracy": {kind: best for kind in final["accuracy"] if (best := best_of(run.rows, kind))},
        "best-round": run.best,
        "stopped-early": len(rounds) < run.settings.run.rounds,
        "metrics": final.get("metrics", {}),
        "validation": final.get("validation", {}),
        "accuracy-of-clients": {site: client["accuracy"] for site, client in final["clients"].items()},
        "bytes": sizes,
        "trouble": lost,
        "bounded": in_order({reason for row in run.rows for reason in row.get("bounded", [])}),
        "warnings": [*doubts_of_outcome(run.rows, final, run.files.sites(), run.settings.run.metrics)],
        "void-rounds": sum(row["void"] for row in rounds),
        "resumed-after-rounds": [last for _, last in run.start.run_history.earlier],
        "ended": time.time(),
        "seconds": time.monotonic() - run.began,
        "seconds-per-round": sum(row["seconds"]["total"] for row in rounds) / max(1, len(rounds)),
        "versions": versions | {name: version(name) for name in ("flwr", "torch", "numpy")} | own_code,
        "commit": commit(),
        "machine": machine(),
        "settings": to_run_config(run.settings),
    }


def _client_row(report: Report) -> ClientRow:
    row: ClientRow = {
        "accuracy": {kind: correct / max(1, report.test_samples) for kind, correct in report.correct.items()},
        "losses": report.losses,
        "seconds": report.seconds,
        "test-samples": report.test_samples,
        "train-samples": report.train_samples,
        "metrics": report.metrics,
        "validation-samples": report.validation_samples,
        "validation": report.validation,
    }
    return _without_empty(row)


def _of_new_client(report: Report) -> Report:
    """The report of a client that has never trained: its figures have names of their own, ``head/new-clients``."""
    figures = {kind: correct / max(1, report.test_samples) for kind, correct in report.correct.items()}
    own = {name + NEW: figure for name, figure in (figures | report.metrics).items()}
    return replace(report, correct={}, metrics=own, validation={})


def _figures(
    reports: Mapping[str, Report], means: Means | None, liars: int
) -> tuple[Accuracies, dict[str, float], Accuracies, Accuracies]:
    """Accuracies, losses, metrics and validation over the clients, or over all their samples where these are hidden."""
    if means is not None:
        both = ("mean", "weighted")
        of_all = {group: {name: dict.fromkeys(both, mean) for name, mean in means[group].items()} for group in means}
        return of_all["correct"], means["losses"], of_all["metrics"], of_all["validation"]
    metrics = _over_clients([(report.metrics, report.test_samples) for report in reports.values()], liars)
    validation = _over_clients([(report.validation, report.validation_samples) for report in reports.values()], liars)
    tested = [(report.correct, report.test_samples) for report in reports.values() if report.test_samples]
    shares = _over_clients([({kind: hits / n for kind, hits in correct.items()}, n) for correct, n in tested], liars)
    weights = {site: report.train_samples for site, report in reports.items() if report.losses}
    total = sum(weights.values())
    losses = _sums([{k: v * weights[site] / total for k, v in reports[site].losses.items()} for site in weights])
    naming = {kind: sum(kind in correct for correct, _ in tested) for kind in shares}  # liars alone name no true one
    true = [kind for kind in KINDS if kind in naming and not naming[kind] <= liars < max(naming.values())]
    return {kind: shares[kind] for kind in true}, losses, metrics, validation


def _over_clients(figures: list[tuple[dict[str, float], int]], liars: int) -> Accuracies:
    """Each of the clients' figures, and samples, over those that have it."""
    names = dict.fromkeys(name for of_client, _ in figures for name in of_client)
    having = {name: [(own[name], samples) for own, samples in figures if name in own] for name in names}
    return {name: over_clients([own for own, _ in of], [n for _, n in of], liars) for name, of in having.items()}


def _sums(tables: list[dict[str, float]]) -> dict[str, float]:
    return {key: sum(table.get(key, 0.0) for table in tables) for key in dict.fromkeys(chain(*tables))}
