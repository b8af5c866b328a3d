"""The screen: the clients, a line for each round with what went wrong in it, and the final table."""

from __future__ import annotations

from collections import Counter

from protofl_common.basics.text import in_order
from protofl_common.experiment.settings import to_run_config
from protofl_common.maths.aggregation import FEWEST
from protofl_common.privacy.plan import protections
from protofl_common.runs.comparison import counted
from protofl_common.runs.folder import TROUBLE, RoundRow
from server_app.callbacks.base import Callback, Run
from server_app.callbacks.console import class_strip, final_table, least_line, round_line, samples_line
from server_app.log import say
from server_app.result import RoundResult

MOST_NAMED = 20
"""Clients that are named in one line."""
RECENT = 3
"""Rounds whose mean duration tells how long the rest will take."""


class Screen(Callback):
    """Prints; a warning that stays the same is printed once."""

    def __init__(self, run: Run) -> None:
        self.warned = {reason for row in run.rows for reason in row.get("bounded", [])}

    def on_start(self, run: Run) -> None:
        """Show who takes part; for a baseline, only what is different."""
        settings, federation = run.settings, run.federation
        by_name = federation.cards
        cards = by_name.values()
        archs, devices = counted(card.arch for card in cards), counted(card.device for card in cards)
        if federation.baseline:
            say(f"baseline · models: {archs}")
            return
        say(f"{len(cards)} clients · {run.strategy.num_classes} classes · partition {settings.data.partition}")
        if not settings.privacy.secagg:
            say(samples_line(cards, settings.data))
            if line := least_line(cards, settings.data):
                say(line)
        introduced = {} if settings.privacy.secagg else by_name
        without = [name for name, card in introduced.items() if not card.validation_samples]
        if without and (settings.data.validation_fraction or len(without) < len(cards)):
            names = _first(without)
            say(f"too small for validation samples, or without any marked, so that all stay for training: {names}")
        say(f"models: {archs} · devices: {devices}")
        if strip := class_strip(run.files.sites()):
            say(strip)
        if not settings.hides_samples:
            shares = _shares({name: card.train_samples for name, card in by_name.items()})
            say(f"shares of the training samples: {shares}")
        holders = Counter(label for card in cards for label in card.holds)
        bounds = federation.bounds
        few, merging = sum(number < FEWEST for number in holders.values()), bounds.prototypes[0]
        if few and merging != "mean":
            say(f"warning: fewer than {FEWEST} clients hold {few} classes, where merging = {merging!r} outvotes nobody")
        if bounds.liars or not federation.simulated:
            say(f"{bounds}")
        for line in protections(to_run_config(settings)):
            say(line)
        say("accuracies of a round are those of what the clients received at its start, before its training")

    def on_round(self, run: Run, row: RoundRow, result: RoundResult) -> None:
        """Show what went wrong, and the round in a line."""
        missing = dict.fromkeys(result.missing, f"no answer in {result.waited:.0f} s")
        troubles = {"failed": result.failed, "refused": result.refused, "missing": missing, "late": result.late}
        for kind in TROUBLE:
            for site, reason in troubles[kind].items():
                say(f"  {kind}: {site}: {reason}")
        for reason in in_order(result.bounded - self.warned):
            say(f"  warning: {reason}")
        self.warned |= result.bounded
        if result.not_merged:
            say(f"  void: {result.not_merged}; nothing was merged")
        if result.final:
            return
        rounds = run.settings.run.rounds
        recent = [past["seconds"]["total"] for past in run.rows[-RECENT:]]  # the clients' start-up is not in them
        rounds_left = rounds - result.number + run.runs_later * rounds
        line = round_line(row, rounds, sum(recent) / len(recent) * rounds_left)
        several = run.settings.baselines or run.federation.baseline
        say(f"{run.strategy.row.title}: {line}" if several else line)

    def on_end(self, run: Run, row: RoundRow, result: RoundResult) -> None:
        """Show the final table."""
        if not run.federation.baseline:
            say(final_table(run.files.finished_summary()))


def _shares(samples: dict[str, int]) -> str:
    """The largest first, and how many others there are."""
    largest = sorted(in_order(samples), key=samples.__getitem__, reverse=True)
    total = max(1, sum(samples.values()))
    return _first([f"{name} {100 * samples[name] / total:.1f} %" for name in largest], " with less")


def _first(texts: list[str], others: str = " others") -> str:
    """As many as are named in one line, and how many more there are."""
    return ", ".join(texts[:MOST_NAMED]) + (f", and {len(texts) - MOST_NAMED}{others}" if texts[MOST_NAMED:] else "")
