"""What a run shows and leaves behind.

A run's folder holds
    ``settings.toml``            every setting, usable again with ``--run-config``
    ``metrics.jsonl``            one line per round: figures over clients, per client, bytes, seconds, failures
    ``summary.json``             the final figures, totals and versions
    ``prototypes.safetensors``   the global prototypes, where the algorithm has them
    ``weights.safetensors``      the global model, where the algorithm has one
    ``clients/``                 in simulation, the clients' private models
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from protofl_common.messages import Report
from protofl_common.metrics import over_clients
from protofl_common.options import SettingsError
from protofl_common.prototypes import Prototypes
from protofl_common.settings import Settings, to_run_config
from server_app.screen import final_table, round_line, say
from server_app.strategies.base import Outcome, ServerStrategy

ACCURACIES = ("prototype", "head")


def name_of_run(settings: Settings, run_id: int) -> str:
    """``run-name``, or time, algorithm, data set and the start of Flower's run id."""
    if name := settings.run.run_name:
        if Path(name).name != name or name.startswith("."):
            raise SettingsError(f"run-name = {name!r}: must be a plain folder name, without slashes")
        return name
    now = time.strftime("%Y%m%d-%H%M%S")
    return f"{now}-{settings.run.algo}-{settings.data.dataset}-{str(run_id)[:6]}"


class Results:
    """Collects a run's rounds, prints a line for each, and writes the folder as the run goes on."""

    def __init__(self, settings: Settings, run_name: str) -> None:
        self.settings = settings
        self.folder = (Path(settings.run.out_dir) / run_name).resolve()
        if (self.folder / "settings.toml").exists():
            raise SettingsError(f"run-name = {run_name!r}: {self.folder} holds a run already; choose another name")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.trouble: Counter[str] = Counter()
        (self.folder / "settings.toml").write_text(_as_toml(settings), encoding="utf-8")
        (self.folder / "metrics.jsonl").write_text("", encoding="utf-8")

    def announce(self, strategy: ServerStrategy) -> None:
        """Who takes part."""
        cards = strategy.federation.cards.values()
        archs = Counter(card.arch for card in cards)
        train, test = sum(card.train_samples for card in cards), sum(card.test_samples for card in cards)
        say(f"{len(cards)} clients · {train} training and {test} test samples · {strategy.num_classes} classes")
        say("models: " + ", ".join(f"{number} × {arch}" for arch, number in sorted(archs.items())))
        say("accuracies of a round are those of what the clients received at its start, before its training")

    def add_round(self, number: int, outcome: Outcome, seconds: dict[str, float], figures: dict[str, Any]) -> None:
        """A training round."""
        row = self._row("round", number, number - 1, outcome, seconds)
        if figures:
            row["server"] = figures
        self._note(row, outcome)
        rounds = self.settings.run.rounds
        left = (time.monotonic() - self.started) / number * (rounds - number)
        say(round_line(row, rounds, left))

    def finish(self, number: int, outcome: Outcome, seconds: dict[str, float], strategy: ServerStrategy) -> None:
        """The final evaluation, after round ``number``: print the table, write the summary and what was learnt."""
        row = self._row("final", number, number, outcome, seconds)
        self._note(row, outcome)
        if strategy.global_prototypes is not None:
            save_file(_arrays(strategy.global_prototypes), self.folder / "prototypes.safetensors")
        if strategy.global_weights is not None:
            save_file(strategy.global_weights, self.folder / "weights.safetensors")
        summary = self._summary(row, strategy)
        _write_whole(self.folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        say(final_table(summary))
        say(f"results: {self.folder}")

    @staticmethod
    def _row(kind: str, number: int, evaluated: int, outcome: Outcome, seconds: dict[str, float]) -> dict[str, Any]:
        reports = outcome.reports
        return {
            "kind": kind,
            "round": number,
            "evaluated-after-round": evaluated,
            "accuracy": _accuracies(reports),
            "losses": _mean_losses(reports),
            "bytes": {"up": outcome.bytes_up, "down": outcome.bytes_down},
            "asked": len(outcome.asked),
            "valid": len(reports),
            "void": outcome.void,
            "failed": outcome.failed,
            "refused": outcome.refused,
            "missing": outcome.missing,
            "clients": {site: _client_row(report, outcome.prototypes.get(site)) for site, report in reports.items()},
            "seconds": seconds | {"clients": _phase_totals(reports)},
        }

    def _note(self, row: dict[str, Any], outcome: Outcome) -> None:
        """Keep a row and say what went wrong in it."""
        self.rows.append(row)
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        troubles = {"failed": outcome.failed, "refused": outcome.refused}
        troubles["missing"] = dict.fromkeys(
            outcome.missing, f"no answer in {self.settings.federation.round_timeout:g} s"
        )
        for kind, sites in troubles.items():
            self.trouble[kind] += len(sites)
            for site, reason in sites.items():
                say(f"  {kind}: {site}: {reason}")
        if outcome.void:
            least = self.settings.federation.min_replies
            say(f"  void: {len(outcome.reports)} valid replies, fewer than min-replies = {least}; nothing was merged")

    def _summary(self, final: dict[str, Any], strategy: ServerStrategy) -> dict[str, Any]:
        rounds = [row for row in self.rows if row["kind"] == "round"]
        return {
            "algorithm": strategy.row.title,
            "dataset": self.settings.data.dataset,
            "partition": self.settings.data.partition,
            "clients": {
                name: {"arch": card.arch, "domain": card.domain, "parameters": card.parameters}
                for name, card in strategy.federation.cards.items()
            },
            "rounds": len(rounds),
            "accuracy": final["accuracy"],
            "best-accuracy": {kind: _best(self.rows, kind) for kind in final["accuracy"]},
            "accuracy-of-clients": {site: client["accuracy"] for site, client in final["clients"].items()},
            "bytes": {way: sum(row["bytes"][way] for row in rounds) for way in ("up", "down")},
            "trouble": dict(self.trouble),
            "void-rounds": sum(row["void"] for row in rounds),
            "seconds": time.monotonic() - self.started,
            "seconds-per-round": sum(row["seconds"]["total"] for row in rounds) / max(1, len(rounds)),
            "versions": {name: version(name) for name in ("flwr", "torch", "numpy")}
            | {"python": platform.python_version()},
            "settings": to_run_config(self.settings),
        }


def _client_row(report: Report, prototypes: list[int] | None) -> dict[str, Any]:
    tested = max(1, report.test_samples)
    several = {} if prototypes is None else {"prototypes-of-classes": prototypes}
    return several | {
        "train-samples": report.train_samples,
        "test-samples": report.test_samples,
        "accuracy": {kind: correct / tested for kind, correct in report.correct.items()},
        "losses": report.losses,
        "seconds": report.seconds,
    }


def _accuracies(reports: dict[str, Report]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in ACCURACIES:
        with_kind = [report for report in reports.values() if kind in report.correct and report.test_samples]
        shares = [report.correct[kind] / report.test_samples for report in with_kind]
        if shares:
            found[kind] = over_clients(shares, [report.test_samples for report in with_kind])
    return found


def _mean_losses(reports: dict[str, Report]) -> dict[str, float]:
    """Each loss term, averaged over the clients by training samples."""
    totals: dict[str, float] = defaultdict(float)
    samples = sum(report.train_samples for report in reports.values() if report.losses)
    for report in reports.values():
        for name, value in report.losses.items():
            totals[name] += value * report.train_samples / samples
    return dict(totals)


def _phase_totals(reports: dict[str, Report]) -> dict[str, float]:
    """Seconds of each phase, summed over the clients."""
    totals: dict[str, float] = defaultdict(float)
    for report in reports.values():
        for phase, seconds in report.seconds.items():
            totals[phase] += seconds
    return dict(totals)


def _best(rows: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """The best mean accuracy and after which round it was."""
    best = max((row for row in rows if kind in row["accuracy"]), key=lambda row: row["accuracy"][kind]["mean"])
    return {"mean": best["accuracy"][kind]["mean"], "after-round": best["evaluated-after-round"]}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("flwr", "torch", "numpy")} | {"python": platform.python_version()}


def _arrays(prototypes: Prototypes) -> dict[str, Any]:
    return {"means": prototypes.means.contiguous(), "labels": prototypes.labels.contiguous()}


def _as_toml(settings: Settings) -> str:
    """The run's settings as a flat TOML file that ``flwr run --run-config`` takes."""
    lines = []
    for key, value in to_run_config(settings).items():
        lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "# The settings of this run. Run it again: flwr run . --run-config <this file>\n" + "\n".join(lines) + "\n"


def _write_whole(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader never sees half a file."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
