"""What a run shows and leaves behind.

A run's folder holds
    ``settings.toml``            every setting, usable again with ``--run-config``
    ``resume.toml``              the same, to let the run go on after it was stopped
    ``checkpoints/``             what that takes, after each of the last three rounds (`checkpoint.py`)
    ``metrics.jsonl``            one line per round: figures over clients, per client, bytes, seconds, failures
    ``run.log``                  what the run has said, with time and level
    ``summary.json``             the final figures, totals and versions
    ``prototypes.safetensors``   the global prototypes, where the algorithm has them
    ``weights.safetensors``      the global model, where the algorithm has one
    ``clients/``                 in simulation, the clients' private models
    ``sites.json``, ``prototypes.jsonl``, ``client-prototypes.safetensors``, ``test-features.safetensors``
                                 what the report shows beside the metrics (`artifacts.py`)
    ``report.html``, ``report.md``   the page with figures, and a short one as text (`protofl_common/report`)
    ``tensorboard/``             event files, where asked for (`trackers.py`)
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Literal

from protofl_common.basics.code_version import code_version, commit, machine
from protofl_common.basics.files import sync, write_text
from protofl_common.basics.tensorfile import write_tensors
from protofl_common.basics.text import as_file_name, in_order
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import load
from protofl_common.config.sections import TRACKERS, keys_that_change
from protofl_common.experiment.settings import Settings, to_run_config
from protofl_common.maths.aggregation import FEWEST
from protofl_common.privacy.words import protections
from protofl_common.runs.comparison import compared, counted, sentence
from protofl_common.runs.folder import (
    KINDS,
    METRICS,
    SITES,
    SUMMARY,
    TROUBLE,
    Accuracies,
    BestRound,
    ClientRow,
    RoundRow,
    RunFolder,
    Seconds,
    Summary,
)
from protofl_common.runs.metrics import best_of, best_round, has_stalled, over_clients
from protofl_common.wire.records import Report
from server_app.run.artifacts import Recording
from server_app.run.checkpoint import Checkpoint
from server_app.run.console import class_strip, comparison_table, final_table, least_line, round_line, samples_line, say
from server_app.run.trackers import Tracker
from server_app.strategies.base import Strategy
from server_app.validation.replies import Outcome

MOST_NAMED = 20
"""Sites that are named in one line."""
FOLDERS = keys_that_change("name", "machine")
"""Settings that no tracker is told: where things lie."""
RECENT = 3
"""Rounds whose mean duration tells how long the rest will take."""


def name_of_run(settings: Settings, run_id: int) -> str:
    """``run-name``, or time, algorithm, data set and the start of Flower's run id."""
    now = time.strftime("%Y%m%d-%H%M%S")
    data = as_file_name(settings.data.dataset)
    return settings.run.run_name or f"{now}-{settings.run.algo}-{data}-{str(run_id)[:6]}"


class Results:
    """Collects a run's rounds, prints a line for each, and writes the folder as the run goes on."""

    def __init__(self, settings: Settings, folder: Path, start: Checkpoint, later: int = 0) -> None:
        self.settings = settings
        self.rounds_later = later * settings.run.rounds
        """Of the baselines that follow this run."""
        self.folder = folder
        self.start = start
        self.began = time.monotonic() - start.seconds
        self.files = RunFolder(folder)
        self.metrics = folder / METRICS
        self.rows: list[RoundRow] = []
        """Without the figures of each client, which grow with clients and rounds; those are in the file."""
        self.trouble: Counter[str] = Counter()
        self.bounded: set[str] = set()
        """Whose part in the aggregate was reduced, and how."""
        self.recording = Recording(settings, folder)
        if start.resumed:
            self._take_up()
        self.callback = self._callback(settings.run.callback) if settings.run.callback else None

    def _take_up(self) -> None:
        """The rows of the rounds that count; what was written after them goes."""
        start, rounds = self.start, self.settings.run.rounds
        if not self.metrics.exists() or self.metrics.stat().st_size < start.metrics_bytes:
            raise SettingsError(f"resume = true: {self.metrics} lacks rows of the first {start.round} rounds")
        os.truncate(self.metrics, start.metrics_bytes)
        for row in self.files.each_row():
            self.rows.append({**row, "clients": {}})
            self.trouble.update({kind: len(row[kind]) for kind in TROUBLE})
            self.bounded.update(row.get("bounded", []))
        self.files.drop_margins_after(start.round)
        then = f"round {start.round + 1} is next" if start.round < rounds else "its final evaluation is next"
        say(f"resuming {self.folder.name} after round {start.round} of {rounds}; {then}")

    def keep(self, number: int, strategy: Strategy) -> None:
        """Checkpoint the run after the round ``number``: from here on it can be resumed."""
        if not self.metrics.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.metrics.touch()
        sync(self.metrics)
        replace(
            self.start,
            round=number,
            sites=tuple(strategy.federation.cards),
            owners=strategy.federation.owners,
            num_partitions=strategy.federation.num_partitions,
            seconds=time.monotonic() - self.began,
            metrics_bytes=self.metrics.stat().st_size,
            state=strategy.present_state(),
        ).write(self.folder)
        for file, name in (("settings.toml", ""), ("resume.toml", self.folder.name)):
            if not (self.folder / file).exists():
                text = _as_toml(self.settings, self.folder / file, strategy.federation.num_partitions, name)
                write_text(self.folder / file, text)

    def announce(self, strategy: Strategy) -> None:
        """Who takes part; with a run's baselines only what is different."""
        self.recording.sites(strategy)
        by_name = strategy.federation.cards
        cards = by_name.values()
        archs, devices = counted(card.arch for card in cards), counted(card.device for card in cards)
        if strategy.federation.baseline:
            say(f"baseline · models: {archs}")
            return
        say(f"{len(cards)} clients · {strategy.num_classes} classes · partition {self.settings.data.partition}")
        if not self.settings.privacy.secagg:
            say(samples_line(cards, self.settings.data))
            if line := least_line(cards, self.settings.data):
                say(line)
        introduced = {} if self.settings.privacy.secagg else by_name
        without = [name for name, card in introduced.items() if not card.validation_samples]
        if without and (self.settings.data.validation_fraction or len(without) < len(cards)):
            said = _first(without)
            say(f"too small for validation samples, or without any marked, so that all stay for training: {said}")
        say(f"models: {archs} · devices: {devices}")
        if strip := class_strip(self.files.sites()):
            say(strip)
        if not self.settings.hides_samples:
            say(
                f"shares of the training samples: {_shares({name: one.train_samples for name, one in by_name.items()})}"
            )
        holders = Counter(label for card in cards for label in card.holds)
        bounds = strategy.federation.bounds
        few, merging = sum(number < FEWEST for number in holders.values()), bounds.prototypes[0]
        if few and merging != "mean":
            say(f"warning: fewer than {FEWEST} clients hold {few} classes, where merging = {merging!r} outvotes nobody")
        if bounds.liars or not strategy.federation.simulated:
            say(f"{bounds}")
        for line in protections(to_run_config(self.settings)):
            say(line)
        say("accuracies of a round are those of what the clients received at its start, before its training")

    def add_round(self, number: int, strategy: Strategy, seconds: Seconds, figures: dict[str, float]) -> None:
        """A training round."""
        outcome = strategy.outcome
        row = self._row("round", number, number - 1, outcome, seconds, strategy.federation.bounds.liars)
        if figures:
            row["server"] = figures
        if strategy.row.several_per_class:
            for site, sent in outcome.prototypes.items():
                row["clients"][site]["prototypes-of-classes"] = sent.labels.bincount(
                    minlength=strategy.num_classes
                ).tolist()
        self._note(row, outcome)
        self.recording.add_round(number, strategy)
        rounds = self.settings.run.rounds
        lately = [one["seconds"]["total"] for one in self.rows[-RECENT:]]  # the clients' start-up is not in them
        line = round_line(row, rounds, sum(lately) / len(lately) * (rounds - number + self.rounds_later))
        say(f"{strategy.row.title}: {line}" if self.settings.baselines or strategy.federation.baseline else line)

    @property
    def best(self) -> BestRound | None:
        """The best round so far."""
        return best_round(self.rows, self.settings.run.early_stopping_metric)

    @property
    def stalled(self) -> bool:
        """Whether ``early-stopping`` ends the run here; SettingsError for a metric that it does not measure."""
        return has_stalled(self.rows, self.settings.run.early_stopping_metric, self.settings.run.early_stopping)

    def add_final(self, number: int, strategy: Strategy, seconds: Seconds) -> RoundRow:
        """The final evaluation, after round ``number``: its row."""
        outcome = strategy.outcome
        row = self._row("final", number, number, outcome, seconds, strategy.federation.bounds.liars)
        self._note(row, outcome)
        return row

    def finish(self, row: RoundRow, strategy: Strategy) -> None:
        """Print the table, write the summary and what was learnt; ``row``: the final evaluation's."""
        if strategy.global_prototypes is not None:
            kept = {"means": strategy.global_prototypes.means, "labels": strategy.global_prototypes.labels}
            write_tensors(self.folder / "prototypes.safetensors", kept, {})
        if strategy.global_weights is not None:
            write_tensors(self.folder / "weights.safetensors", strategy.global_weights, {})
        self.recording.finish(strategy, row["round"])
        summary = self._summary(row, strategy)
        self.files.write(SUMMARY, summary, indent=2)
        if not strategy.federation.baseline:
            say(final_table(summary))

    def _callback(self, name: str) -> Callable[[RoundRow], object]:
        """A tracker, or a function of the user's."""
        if name in TRACKERS:
            config = {key: value for key, value in to_run_config(self.settings).items() if key not in FOLDERS}
            return Tracker(name, self.folder, config, self.rows)
        found: Callable[[RoundRow], object] = load(name, "callback")
        if not callable(found):
            raise SettingsError(f"callback = {name!r}: it is no function")
        return found

    def _call_back(self, row: RoundRow) -> None:
        """Give the user's function a row of its own; that it fails is said, and fails nothing."""
        if self.callback is None:
            return
        try:
            self.callback(deepcopy(row))
        except Exception as error:
            say(f"  callback: {self.settings.run.callback} failed, {type(error).__name__}: {error}")

    @staticmethod
    def _row(
        kind: Literal["round", "final"], number: int, evaluated: int, outcome: Outcome, seconds: Seconds, liars: int
    ) -> RoundRow:
        reports = outcome.reports
        accuracy, losses, metrics, validation = _figures(outcome, liars)
        row: RoundRow = {
            "kind": kind,
            "round": number,
            "evaluated-after-round": evaluated,
            "accuracy": accuracy,
            "losses": losses,
            "bytes": {"up": outcome.bytes_up, "down": outcome.bytes_down},
            "asked": len(outcome.asked),
            "valid": len(reports),
            "void": bool(outcome.void),
            "failed": outcome.failed,
            "refused": outcome.refused,
            "missing": outcome.missing,
            "late": outcome.late,
            "clients": {site: _client_row(report) for site, report in reports.items()},
            "seconds": {**seconds, "clients": _sums([report.seconds for report in reports.values()])},
        }
        if metrics:
            row["metrics"] = metrics
        if validation:
            row["validation"] = validation
        if outcome.void:
            row["void-because"] = outcome.void
        if outcome.bounded:
            row["bounded"] = in_order(outcome.bounded)
        if outcome.epsilon is not None:
            row["epsilon"] = outcome.epsilon
        return row

    def _note(self, row: RoundRow, outcome: Outcome) -> None:
        """Keep a row and say what went wrong in it."""
        self.rows.append({**row, "clients": {}})
        self.files.add(METRICS, row)
        self._call_back(row)
        missing = dict.fromkeys(outcome.missing, f"no answer in {outcome.waited:.0f} s")
        troubles = {"failed": outcome.failed, "refused": outcome.refused, "missing": missing, "late": outcome.late}
        for kind in TROUBLE:
            self.trouble[kind] += len(troubles[kind])
            for site, reason in troubles[kind].items():
                say(f"  {kind}: {site}: {reason}")
        for reason in in_order(outcome.bounded - self.bounded):
            say(f"  warning: {reason}")
        self.bounded |= outcome.bounded
        if outcome.void:
            say(f"  void: {outcome.void}; nothing was merged")

    def _summary(self, final: RoundRow, strategy: Strategy) -> Summary:
        rounds = [row for row in self.rows if row["kind"] == "round"]
        spent: Summary = {"epsilon": final["epsilon"]} if "epsilon" in final else {}  # type: ignore[typeddict-item]
        return spent | {
            "algorithm": strategy.row.title,
            "dataset": self.settings.data.dataset,
            "partition": self.settings.data.partition,
            "clients": {
                name: {"arch": card.arch, "domain": card.domain, "parameters": card.parameters}
                for name, card in strategy.federation.cards.items()
            },
            "rounds": len(rounds),
            "accuracy": final["accuracy"],
            "best-accuracy": {kind: best for kind in final["accuracy"] if (best := best_of(self.rows, kind))},
            "best-round": self.best,
            "stopped-early": len(rounds) < self.settings.run.rounds,
            "metrics": final.get("metrics", {}),
            "validation": final.get("validation", {}),
            "accuracy-of-clients": {site: client["accuracy"] for site, client in final["clients"].items()},
            "bytes": {way: sum(row["bytes"][way] for row in self.rows) for way in ("up", "down")},
            "trouble": dict(self.trouble),
            "bounded": in_order(self.bounded),
            "void-rounds": sum(row["void"] for row in rounds),
            "resumed-after-rounds": [last for _, last in self.start.lineage.earlier],
            "seconds": time.monotonic() - self.began,
            "seconds-per-round": sum(row["seconds"]["total"] for row in rounds) / max(1, len(rounds)),
            "versions": _versions(),
            "commit": commit(),
            "machine": machine(),
            "settings": to_run_config(self.settings),
        }


def conclude(settings: Settings, folder: Path) -> None:
    """After the run and its baselines: how they compare, where the results are, and the page."""
    runs = compared(folder, settings.baselines)
    if len(runs) > 1:
        say(comparison_table(runs))
    if runs:
        say(f"result: {sentence(runs)}")
    say(f"results: {folder}")
    draw(settings, folder)


def draw(settings: Settings, folder: Path) -> None:
    """The page with the run's figures, if the settings want it; a failure to draw it is said and fails nothing."""
    if not settings.run.report or not (folder / SITES).exists():
        return
    from protofl_common.report.page import write_report  # takes seconds: when all else is done

    try:
        say(f"report: {write_report(folder)}")
    except Exception as error:
        say(f"report: not drawn, {type(error).__name__}: {error}")


def _shares(samples: dict[str, int]) -> str:
    """The largest first, and how many others there are."""
    largest = sorted(in_order(samples), key=samples.__getitem__, reverse=True)
    total = max(1, sum(samples.values()))
    return _first([f"{name} {100 * samples[name] / total:.1f} %" for name in largest], " with less")


def _first(texts: list[str], others: str = " others") -> str:
    """As many as are named in one line, and how many more there are."""
    return ", ".join(texts[:MOST_NAMED]) + (f", and {len(texts) - MOST_NAMED}{others}" if texts[MOST_NAMED:] else "")


def _client_row(report: Report) -> ClientRow:
    tested = max(1, report.test_samples)
    row: ClientRow = {
        "accuracy": {kind: correct / tested for kind, correct in report.correct.items()},
        "losses": report.losses,
        "seconds": report.seconds,
    }
    if report.test_samples:
        row["test-samples"] = report.test_samples
    if report.train_samples:
        row["train-samples"] = report.train_samples
    if report.metrics:
        row["metrics"] = report.metrics
    if report.validation_samples:
        row |= {"validation-samples": report.validation_samples, "validation": report.validation}
    return row


def _figures(outcome: Outcome, liars: int) -> tuple[Accuracies, dict[str, float], Accuracies, Accuracies]:
    """Accuracies, losses, metrics and validation over the clients, or over all their samples where these are hidden."""
    reports, means = outcome.reports, outcome.means
    if means is not None:
        both = ("mean", "weighted")
        of_all = {group: {name: dict.fromkeys(both, one) for name, one in means[group].items()} for group in means}
        return of_all["correct"], means["losses"], of_all["metrics"], of_all["validation"]
    metrics = _over_clients({site: (one.metrics, one.test_samples) for site, one in reports.items()}, liars)
    validation = _over_clients({site: (one.validation, one.validation_samples) for site, one in reports.items()}, liars)
    return _accuracies(reports, liars), _mean_losses(reports), metrics, validation


def _accuracies(reports: dict[str, Report], liars: int) -> Accuracies:
    tested = {site: (one.correct, one.test_samples) for site, one in reports.items() if one.test_samples}
    shares = {site: ({kind: hits / n for kind, hits in correct.items()}, n) for site, (correct, n) in tested.items()}
    found = _over_clients(shares, liars)
    return {kind: found[kind] for kind in KINDS if kind in found}


def _over_clients(figures: dict[str, tuple[dict[str, float], int]], liars: int) -> Accuracies:
    """Each figure over the clients that have it, where these are enough to outvote the ``liars``.

    ``figures``: those of each client, and its number of samples.
    """
    names = dict.fromkeys(name for of_client, _ in figures.values() for name in of_client)
    having = {name: [(one[name], samples) for one, samples in figures.values() if name in one] for name in names}
    return {
        name: over_clients([value for value, _ in pairs], [samples for _, samples in pairs], liars)
        for name, pairs in having.items()
        if len(pairs) > 2 * liars
    }


def _mean_losses(reports: dict[str, Report]) -> dict[str, float]:
    """Each loss term, averaged over the clients by training samples."""
    weights = {site: one.train_samples for site, one in reports.items() if one.losses}
    samples = sum(weights.values())
    return _sums([{k: v * weights[site] / samples for k, v in reports[site].losses.items()} for site in weights])


def _sums(tables: list[dict[str, float]]) -> dict[str, float]:
    """The sum of each entry."""
    return {key: sum(table.get(key, 0.0) for table in tables) for key in dict.fromkeys(chain(*tables))}


def _versions() -> dict[str, str]:
    return {"protofl": code_version(), "python": platform.python_version()} | {
        name: version(name) for name in ("flwr", "torch", "numpy")
    }


def _as_toml(settings: Settings, file: Path, num_partitions: int, resumed: str = "") -> str:
    """The run's settings as a flat TOML file that ``flwr run --run-config`` takes; ``resumed``: to resume that run.

    Like a recipe, it says with how many simulated clients, where the data set is divided among them. Where sites bring
    their own, FEDERATION stands for the connection, whose name a ServerApp does not know.
    """
    values = to_run_config(settings) | ({"resume": True, "run-name": resumed} if resumed else {})
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    among = f" --federation-config 'num-supernodes={num_partitions} client-resources-num-cpus=1'"
    where, options = (".", among) if num_partitions else (". FEDERATION", "")
    command = f"flwr run {where} --run-config {shlex.quote(str(file))}{options}"
    to_do = "Let it go on after a stop" if resumed else "Run it again, under another run-name"
    return f"# The settings of this run. {to_do}:\n# {command} --stream\n" + "\n".join(lines) + "\n"
