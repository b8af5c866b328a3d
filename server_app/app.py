"""The ServerApp: settings -> federation -> rounds -> results."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from protofl_common.basics.files import TensorFileError
from protofl_common.basics.text import as_file_name
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError, check_data_settings
from protofl_common.experiment.node import allow_named
from protofl_common.experiment.settings import Settings, baselines_of
from protofl_common.experiment.study import Study, is_past
from protofl_common.runs.folder import SUMMARY, RoundRow, RunFolder, baseline_folder, checkpoints, troubles
from server_app.callbacks import callbacks_of
from server_app.callbacks.base import ActiveRun, Callback
from server_app.callbacks.metrics import row_of
from server_app.callbacks.screen import conclude, draw
from server_app.callbacks.stopping import epsilon_spent
from server_app.checkpoint import alone_in, check_free, check_same, starting_point
from server_app.log import logged, say
from server_app.network.exchange import MessageExchange
from server_app.network.flower_compat import find_messages_by_node
from server_app.network.membership import Federation, FederationError
from server_app.replies import RoundResult
from server_app.round import final_evaluation, train_round
from server_app.strategies.base import built

app = ServerApp()

EXPECTED = (SettingsError, DataError, FederationError, TensorFileError, OSError)  # What the user can mend
MOST_IDLE_ROUNDS = 3  # Rounds in a row that changed nothing, after which a run gives up


@app.main()
def main(grid: Grid, context: Context) -> None:
    federate(grid, context)


def federate(grid: Grid, context: Context) -> Path:
    """A run and its baselines; the folder of its results. What the user can mend ends it with one clear message."""
    find_messages_by_node(grid)
    try:
        allow_named(context.run_config)  # whoever submits a run, unless a worker's operator has said
        settings = Settings.from_run_config(context.run_config)
        if is_past((study := Study.of(context.run_config)).until):
            raise SettingsError(f"study-until = {study.until!r}: the study is over")
        check_data_settings(settings.data)
        baselines = baselines_of(settings, context.run_config)
        data = "own-data" if settings.data.partition == "own" else as_file_name(settings.data.dataset)
        usual = time.strftime("%Y%m%d-%H%M%S"), settings.run.algo, data
        name = settings.run.run_name or "-".join([*usual, str(context.run_id)[:6]])
        folder = (Path(settings.run.out_dir).expanduser() / name).resolve()
        for place in (folder, *(baseline_folder(folder, algo) for algo in baselines)):
            if not settings.run.resume:
                check_free(place)
        if settings.run.resume and (folder / SUMMARY).exists():
            check_same(RunFolder(folder).finished_summary()["settings"], settings, folder)
            say(f"{folder.name} is complete: nothing of it is left to do")
        else:
            one_run(grid, settings, folder, context.run_id, len(baselines))
        for later, (algo, its_settings) in zip(reversed(range(len(baselines))), baselines.items(), strict=True):
            baseline_run(grid, its_settings, baseline_folder(folder, algo), context.run_id, later)
        conclude(settings, folder)
        return folder
    except EXPECTED as error:
        print(f"\nprotofl: this run cannot go on\n{error}\n", flush=True)
        raise error.with_traceback(None) from None


def one_run(grid: Grid, settings: Settings, folder: Path, run_id: int, later: int, baseline: str = "") -> None:
    """From introductions to the summary; ``later``: how many runs follow; ``baseline``: the algorithm of a baseline."""
    with alone_in(folder):
        run = ActiveRun(settings, folder, starting_point(settings, folder, run_id), later)
        callbacks = callbacks_of(run)
        federation = Federation(grid, settings, run.start, baseline)
        federation.gather()
        run.strategy = built(federation)
        run.strategy.restore(run.start.state)
        try:
            with logged(folder / "run.log"):
                run_rounds(run, callbacks)
        except (FederationError, TensorFileError, OSError):
            draw(settings, folder)
            raise


def baseline_run(grid: Grid, settings: Settings, folder: Path, run_id: int, later: int) -> None:
    """The same for a baseline, unless a run that is resumed has finished it; its failure costs a line and no more."""
    resumed = settings.run.resume
    if resumed and (folder / SUMMARY).exists():
        return
    settings = replace(settings, run=replace(settings.run, resume=resumed and bool(checkpoints(folder))))
    try:
        one_run(grid, settings, folder, run_id, later, baseline=settings.run.algo)
    except EXPECTED as error:
        say(f"baseline {settings.run.algo}: not finished: {error}")


def run_rounds(run: ActiveRun, callbacks: list[Callback]) -> None:
    """All rounds that are left and the final evaluation; FederationError when several in a row changed nothing."""
    federation, strategy, wanted = run.federation, run.strategy, run.settings.run
    run.exchange = exchange = MessageExchange(federation, run.folder.name)
    say(f"{strategy.row.title} ({strategy.row.paper})")
    for callback in callbacks:
        callback.on_start(run)
    last, idle = run.start.round, 0
    for number in range(last + 1, wanted.rounds + 1):
        start = time.monotonic()
        federation.await_sites()
        if why := next(filter(None, (callback.why_stop(run, number) for callback in callbacks)), ""):
            say(why)
            break
        more = {name: record for callback in callbacks for name, record in callback.records(run).items()}
        result, last = train_round(strategy, number, exchange, more), number
        reported(run, callbacks, result, start)
        idle = idle + 1 if result.not_merged else 0
        if idle == MOST_IDLE_ROUNDS:
            few = f"{idle} rounds in a row changed nothing: {result.not_merged}{_first_reason(run.rows[-idle:])}"
            raise FederationError(f"{few}; see {run.folder}, where resume.toml lets it go on")
    if not any(row["valid"] for row in run.rows):
        raise FederationError(f"no client has sent one valid reply: nothing was merged{_first_reason(run.rows)}")
    start = time.monotonic()
    federation.await_sites()
    result = final_evaluation(strategy, last, exchange)
    if result.not_merged or not result.reports:
        lost = [f"{site}: {reason}" for site, reason in (result.failed | result.refused).items()]
        why = "; ".join([*filter(None, [result.not_merged]), *lost]) or "silence"
        raise FederationError(f"no valid reply to the final evaluation ({why}); resume.toml repeats it")
    row = reported(run, callbacks, result, start)
    for callback in callbacks:
        callback.on_end(run, row, result)


def _first_reason(rows: Sequence[RoundRow]) -> str:
    return next((f"; the first reason: {reason}" for row in rows for _, _, reason in troubles(row)), "")


def reported(run: ActiveRun, callbacks: list[Callback], result: RoundResult, start: float) -> RoundRow:
    """Hand the result of an exchange that began at ``start`` to the callbacks; its line of ``metrics.jsonl``."""
    result.epsilon = epsilon_spent(run, result.number, result.final)
    result.seconds = {"total": time.monotonic() - start, **result.seconds}
    row = row_of(result, run.strategy)
    for callback in callbacks:
        callback.on_round(run, row, result)
    return row
