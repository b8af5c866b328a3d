"""The ServerApp: settings -> federation -> rounds -> results."""

from __future__ import annotations

import time

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from protofl_common.datasets import DataError, check_data_settings
from protofl_common.options import SettingsError
from protofl_common.settings import Settings
from server_app.federation import Federation, FederationError
from server_app.results import Results, name_of_run
from server_app.strategies import STRATEGIES
from server_app.strategies.base import ServerStrategy

app = ServerApp()

MAX_VOID_ROUNDS = 3
"""Rounds in a row with too few valid replies, after which a run gives up."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run. What the user can mend ends it with one clear message, before any client trains."""
    try:
        settings = Settings.from_run_config(context.run_config)
        check_data_settings(settings.data)
        run_name = name_of_run(settings, context.run_id)
        federation = Federation(grid, settings)
        federation.gather()
        strategy = STRATEGIES[settings.run.algo](federation, run_name)
        run_rounds(strategy, Results(settings, run_name))
    except (SettingsError, DataError, FederationError) as error:
        print(f"\nprotofl: this run cannot go on\n{error}\n", flush=True)
        raise error.with_traceback(None) from None


def run_rounds(strategy: ServerStrategy, results: Results) -> None:
    """All rounds and the final evaluation; FederationError when several rounds in a row had too few replies."""
    federation, settings = strategy.federation, strategy.settings
    timeout = settings.federation.round_timeout
    strategy.summary()
    results.announce(strategy)
    void = 0
    for number in range(1, settings.run.rounds + 1):
        start = time.monotonic()
        messages = list(strategy.configure_train(number, None, ConfigRecord(), federation.grid))
        replies = federation.exchange(messages, timeout)
        exchanged = time.monotonic()
        _, figures = strategy.aggregate_train(number, replies)
        done = time.monotonic()
        seconds = {"total": done - start, "exchange": exchanged - start, "aggregate": done - exchanged}
        results.add_round(number, strategy.outcome, seconds, dict(figures or {}))
        void = void + 1 if strategy.outcome.void else 0
        if void == MAX_VOID_ROUNDS:
            raise FederationError(
                f"{void} rounds in a row had fewer valid replies than min-replies; see {results.folder}"
            )
    start = time.monotonic()
    messages = list(strategy.configure_evaluate(settings.run.rounds, None, ConfigRecord(), federation.grid))
    strategy.aggregate_evaluate(settings.run.rounds, federation.exchange(messages, timeout))
    results.finish(settings.run.rounds, strategy.outcome, {"total": time.monotonic() - start}, strategy)
