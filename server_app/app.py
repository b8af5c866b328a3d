"""The ServerApp: settings -> federation -> rounds -> results."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from protofl_common.config.options import SettingsError
from protofl_common.datasets import DataError, check_data_settings
from protofl_common.run_folder import Seconds
from protofl_common.settings import Settings
from protofl_common.tensorfile import TensorFileError
from server_app.network.exchange import MessageExchange
from server_app.network.membership import Federation, FederationError
from server_app.round import final_evaluation, train_round
from server_app.run.checkpoint import alone_in, starting_point
from server_app.run.console import say
from server_app.run.writer import Results, name_of_run
from server_app.strategies import server_half
from server_app.strategies.base import Strategy

app = ServerApp()

MAX_VOID_ROUNDS = 3
"""Rounds in a row that changed nothing, after which a run gives up."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run. What the user can mend ends it with one clear message, before any client trains where possible."""
    try:
        settings = Settings.from_run_config(context.run_config)
        check_data_settings(settings.data)
        run_name = name_of_run(settings, context.run_id)
        folder = (Path(settings.run.out_dir) / run_name).resolve()
        with alone_in(folder):
            start = starting_point(settings, folder, context.run_id)
            results = Results(settings, folder, start)
            federation = Federation(grid, settings, start.lineage, start.owners)
            federation.gather(start.sites, start.num_partitions)
            strategy = server_half(settings.row)(federation)
            strategy.restore(start.state)
            try:
                run_rounds(strategy, results)
            except (FederationError, TensorFileError, OSError):
                results.draw()
                raise
    except (SettingsError, DataError, FederationError, TensorFileError, OSError) as error:
        print(f"\nprotofl: this run cannot go on\n{error}\n", flush=True)
        raise error.with_traceback(None) from None


def run_rounds(strategy: Strategy, results: Results) -> None:
    """All rounds that are left and the final evaluation, with a checkpoint after each round.

    FederationError when several rounds in a row changed nothing.
    """
    federation, settings = strategy.federation, strategy.settings
    exchange, run_name = MessageExchange(federation), results.folder.name
    say(f"{strategy.row.title} ({strategy.row.paper})")
    results.announce(strategy)
    results.keep(results.start.round, strategy)
    void = 0
    for number in range(results.start.round + 1, settings.run.rounds + 1):
        start = time.monotonic()
        federation.await_sites()
        outcome = train_round(strategy, run_name, number, exchange)
        outcome.late = exchange.late
        federation.note_silence(number, (), exchange.late)
        seconds: Seconds = {"total": time.monotonic() - start, **outcome.seconds}
        results.add_round(number, strategy, seconds, outcome.metrics)
        results.keep(number, strategy)
        void = void + 1 if outcome.void else 0
        if void == MAX_VOID_ROUNDS:
            few = f"{void} rounds in a row changed nothing: {outcome.void}"
            raise FederationError(f"{few}; see {results.folder}, where resume.toml lets it go on")
    start = time.monotonic()
    federation.await_sites()
    final_evaluation(strategy, run_name, settings.run.rounds, exchange).late = exchange.late
    results.finish(settings.run.rounds, strategy, {"total": time.monotonic() - start})
