"""The ServerApp: settings -> federation -> rounds -> results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from protofl_common.basics.tensorfile import TensorFileError
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError, check_data_settings
from protofl_common.experiment.permissions import allow_named
from protofl_common.experiment.settings import Settings, baselines_of
from protofl_common.runs.folder import RoundRow, Seconds, baseline_folder
from server_app.network.exchange import MessageExchange
from server_app.network.flower_compat import find_messages_by_node
from server_app.network.membership import Federation, FederationError
from server_app.round import final_evaluation, tell_best, train_round
from server_app.run.budget import Budget
from server_app.run.checkpoint import alone_in, can_be_resumed, check_free, is_complete, starting_point
from server_app.run.console import logged, say
from server_app.run.writer import Results, conclude, draw, name_of_run
from server_app.strategies import built
from server_app.strategies.base import Strategy

app = ServerApp()

EXPECTED = (SettingsError, DataError, FederationError, TensorFileError, OSError)
"""What the user can mend."""
MAX_VOID_ROUNDS = 3
"""Rounds in a row that changed nothing, after which a run gives up."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Flower calls this for each run."""
    federate(grid, context)


def federate(grid: Grid, context: Context) -> Path:
    """A run and its baselines; the folder of its results.

    What the user can mend ends it with one clear message, early where possible.
    """
    find_messages_by_node(grid)
    try:
        settings = Settings.from_run_config(context.run_config)
        allow_named(context.run_config)  # whoever submits a run may name code for the server's machine
        check_data_settings(settings.data)
        baselines = baselines_of(settings, context.run_config)
        folder = (Path(settings.run.out_dir) / name_of_run(settings, context.run_id)).resolve()
        if not settings.run.resume:
            for place in (folder, *(baseline_folder(folder, algo) for algo in baselines)):
                check_free(place)
        if not (settings.run.resume and baselines and is_complete(folder)):
            one_run(grid, settings, folder, context.run_id, len(baselines))
        for number, (algo, one) in enumerate(baselines.items(), start=1):
            baseline_run(grid, one, baseline_folder(folder, algo), context.run_id, len(baselines) - number)
        conclude(settings, folder)
        return folder
    except EXPECTED as error:
        print(f"\nprotofl: this run cannot go on\n{error}\n", flush=True)
        raise error.with_traceback(None) from None


def one_run(grid: Grid, settings: Settings, folder: Path, run_id: int, later: int, baseline: str = "") -> None:
    """From the sites' introductions to the summary.

    ``later``: how many runs of as many rounds follow; ``baseline``: the algorithm, where it is that of a baseline.
    """
    with alone_in(folder):
        start = starting_point(settings, folder, run_id)
        results = Results(settings, folder, start, later)
        federation = Federation(grid, settings, start.lineage, start.owners, baseline)
        federation.gather(start.sites, start.num_partitions)
        strategy = built(federation)
        strategy.restore(start.state)
        try:
            with logged(folder / "run.log"):
                run_rounds(strategy, results)
        except (FederationError, TensorFileError, OSError):
            draw(settings, folder)
            raise


def baseline_run(grid: Grid, settings: Settings, folder: Path, run_id: int, later: int) -> None:
    """The same for a baseline, unless a run that is resumed has finished it; its failure is said and costs no more."""
    resumed = settings.run.resume
    if resumed and is_complete(folder):
        return
    settings = replace(settings, run=replace(settings.run, resume=resumed and can_be_resumed(folder)))
    try:
        one_run(grid, settings, folder, run_id, later, baseline=settings.run.algo)
    except EXPECTED as error:
        say(f"baseline {settings.run.algo}: not finished: {error}")


def run_rounds(strategy: Strategy, results: Results) -> None:
    """All rounds that are left and the final evaluation, with a checkpoint after each round.

    FederationError when several rounds in a row changed nothing.
    """
    federation, settings = strategy.federation, strategy.settings
    exchange, run_name = MessageExchange(federation), results.folder.name
    say(f"{strategy.row.title} ({strategy.row.paper})")
    results.announce(strategy)
    results.keep(results.start.round, strategy)
    void, last, budget = 0, results.start.round, Budget(federation, results.start.lineage)
    for number in range(last + 1, settings.run.rounds + 1):
        if results.stalled and results.best:
            since = f"{results.best['metric']} on validation data was the best after round {results.best['after']}"
            say(f"stopped early after round {last} of {settings.run.rounds}: {since} (early-stopping)")
            break
        check_stopping(federation, settings, results.rows)
        start = time.monotonic()
        federation.await_sites()
        if not budget.allows(number):
            break
        outcome = train_round(strategy, run_name, number, exchange, results.best if settings.run.keep_best else None)
        outcome.epsilon, last = budget.spent(number), number
        outcome.late, outcome.waited = exchange.late, exchange.waited
        federation.note_silence(number, (), exchange.late)
        seconds: Seconds = {"total": time.monotonic() - start, **outcome.seconds}
        results.add_round(number, strategy, seconds, outcome.metrics)
        results.keep(number, strategy)
        void = void + 1 if outcome.void else 0
        if void == MAX_VOID_ROUNDS:
            few = f"{void} rounds in a row changed nothing: {outcome.void}"
            raise FederationError(f"{few}; see {results.folder}, where resume.toml lets it go on")
    if not any(row["valid"] for row in results.rows):
        raise FederationError("no client has sent one valid reply: nothing was learnt; the lines above say why")
    start = time.monotonic()
    federation.await_sites()
    outcome = final_evaluation(strategy, run_name, last, exchange)
    outcome.epsilon = budget.spent(last, final=True)
    outcome.late, outcome.waited = exchange.late, exchange.waited
    if outcome.void or not outcome.reports:
        lost = [f"{site}: {reason}" for site, reason in (outcome.failed | outcome.refused).items()]
        why = "; ".join([*filter(None, [outcome.void]), *lost]) or "silence"
        raise FederationError(f"no valid reply to the final evaluation ({why}); resume.toml repeats it")
    final = results.add_final(last, strategy, {"total": time.monotonic() - start})
    if settings.run.keep_best and results.best:
        tell_best(strategy, run_name, last, exchange, results.best)
    results.finish(final, strategy)


def check_stopping(federation: Federation, settings: Settings, rows: Sequence[RoundRow]) -> None:
    """SettingsError where a run shall end by figures on validation data that no client has, or too few.

    With secure aggregation the first evaluation shows it, else the introductions.
    """
    why = "no client has validation samples"
    if settings.privacy.secagg:
        there = not any(row["accuracy"] for row in rows) or any("validation" in row for row in rows)
    else:
        having = sum(card.validation_samples > 0 for card in federation.cards.values())
        there = having > 2 * (liars := federation.bounds.liars)
        if having and not there:
            who = f"{having} of {len(federation.cards)} clients {'has' if having == 1 else 'have'} validation samples"
            why = f"{who}, too few for liars = {liars}"
    if settings.run.early_stopping and not there:
        how = "set validation-fraction, or mark a part `validation` in your own data"
        raise SettingsError(f"early-stopping = {settings.run.early_stopping}: {why}; {how}")
