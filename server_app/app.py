"""The ServerApp: settings -> federation -> rounds -> results."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from protofl_common.basics.files import TensorFileError
from protofl_common.basics.text import as_file_name
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError, check_data_settings
from protofl_common.experiment.node import allow_named
from protofl_common.experiment.settings import Settings, baselines_of
from protofl_common.experiment.study import Study, is_past
from protofl_common.runs.events import Failed, OnEvent, Started
from protofl_common.runs.folder import (
    SUMMARY,
    RoundRow,
    RunFolder,
    baseline_folder,
    checkpoints,
    unused_replies,
)
from server_app.callbacks import callbacks_of
from server_app.callbacks.base import ActiveRun, Callback
from server_app.callbacks.metrics import row_of
from server_app.callbacks.progress import conclude, draw_page
from server_app.callbacks.stopping import planned_epsilon
from server_app.network.exchange import MessageExchange
from server_app.network.flower_compat import find_messages_by_node
from server_app.network.membership import Federation, FederationError
from server_app.protections.secure_sum import SecureSums
from server_app.round import final_evaluation, train_round
from server_app.run.checkpoint import check_free, check_same, locked_run, starting_point
from server_app.run.flow import uploads_of
from server_app.run.log import emit, listening, logged, say
from server_app.run.replies import RoundResult
from server_app.strategies.base import build_strategy

app = ServerApp()

EXPECTED = (SettingsError, DataError, FederationError, TensorFileError, OSError)
"""Errors that the user can mend."""
MOST_IDLE_ROUNDS = 3  # Rounds in a row that changed nothing, after which a run gives up


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do a run of Flower's and print its events, which `flwr run --stream` shows."""
    show = partial(print, flush=True)
    try:
        federate(grid, context, show)
    except EXPECTED as error:
        show(Failed.of(error, is_expected=True))
        raise


def federate(grid: Grid, context: Context, on_event: OnEvent) -> Path:
    """Do a run and its baselines; return the folder of the results.

    `EXPECTED` errors have no traceback of what is inside.
    """
    find_messages_by_node(grid)
    try:
        with listening(on_event):
            return _run_with_baselines(grid, context)
    except EXPECTED as error:
        raise error.with_traceback(None) from None


def _run_with_baselines(grid: Grid, context: Context) -> Path:
    allow_named(context.run_config)  # Whoever submits a run, unless a worker's operator has said
    settings = Settings.from_run_config(context.run_config)
    until = Study.of(context.run_config).until
    if is_past(until):
        raise SettingsError(f"study-until = {until!r}: the study is over")
    check_data_settings(settings.data)
    baselines = baselines_of(settings, context.run_config)

    folder = _folder_of(settings, context.run_id)
    if not settings.run.resume:
        check_free(folder)
        for algo in baselines:
            check_free(baseline_folder(folder, algo))

    if settings.run.resume and (folder / SUMMARY).exists():
        check_same(RunFolder(folder).finished_summary()["settings"], settings, folder)
        say(f"{folder.name} is complete: nothing of it is left to do")
    else:
        one_run(grid, settings, folder, context.run_id, len(baselines))

    later = len(baselines)
    for settings_of_baseline in baselines.values():
        later -= 1
        baseline_run(grid, settings_of_baseline, folder, context.run_id, later)
    conclude(settings, folder)
    return folder


def _folder_of(settings: Settings, run_id: int) -> Path:
    """Return the run's folder: of the name that the user gave, or of time, algorithm and data."""
    name = settings.run.run_name
    if not name:
        began = time.strftime("%Y%m%d-%H%M%S")
        data = as_file_name(settings.data.dataset)
        if settings.data.partition == "own":
            data = "own-data"
        name = f"{began}-{settings.run.algo}-{data}-{str(run_id)[:6]}"
    return (Path(settings.run.out_dir).expanduser() / name).resolve()


def one_run(
    grid: Grid, settings: Settings, main_folder: Path, run_id: int, later: int, baseline: str = ""
) -> None:
    """Do a run from the introductions of its clients to the summary.

    ``later``: how many runs follow; ``baseline``: the algorithm, if this run is a baseline of that
    in ``main_folder``.
    """
    folder = baseline_folder(main_folder, baseline) if baseline else main_folder
    with locked_run(folder):
        run = ActiveRun(settings, folder, starting_point(settings, folder, run_id), later)
        callbacks = callbacks_of(run)
        federation = Federation(grid, settings, run.start, baseline)
        federation.gather()
        run.strategy = build_strategy(federation)
        run.strategy.restore(run.start.state)
        try:
            with logged(folder / "run.log"):
                algorithm = run.strategy.row
                emit(Started(main_folder, algorithm.title, algorithm.paper, bool(baseline)))
                run_rounds(run, callbacks)
        except (FederationError, TensorFileError, OSError):
            report = draw_page(settings, folder)
            if report:
                say(report)
            raise


def baseline_run(
    grid: Grid, settings: Settings, main_folder: Path, run_id: int, later: int
) -> None:
    """Do a baseline, unless a resumed run has finished it; that it fails costs only a line."""
    folder = baseline_folder(main_folder, settings.run.algo)
    resumed = settings.run.resume
    if resumed and (folder / SUMMARY).exists():
        return
    has_begun = resumed and bool(checkpoints(folder))
    settings = replace(settings, run=replace(settings.run, resume=has_begun))
    try:
        one_run(grid, settings, main_folder, run_id, later, baseline=settings.run.algo)
    except EXPECTED as error:
        say(f"baseline {settings.run.algo}: not finished: {error}")


def run_rounds(run: ActiveRun, callbacks: list[Callback]) -> None:
    """Do all rounds that are left, and the final evaluation.

    FederationError when several rounds in a row changed nothing, or nothing was merged at all.
    """
    run.exchange = MessageExchange(run.federation, run.folder.name)
    run.ask_for_uploads = uploads_of
    if run.settings.privacy.sums_only:
        run_id = run.start.run_history.run_id
        run.ask_for_uploads = SecureSums(run.settings, run_id, run.federation.expelled).flow
    for callback in callbacks:
        callback.on_start(run)
    last = _train_rounds(run, callbacks)
    if not any(row["valid"] for row in run.rows):
        reason = _first_reason(run.rows)
        raise FederationError(f"no client has sent one valid reply: nothing was merged{reason}")
    _evaluate(run, callbacks, last)


def _train_rounds(run: ActiveRun, callbacks: list[Callback]) -> int:
    """Do rounds to the last, or until a callback ends the run; return the number of the last."""
    last = run.start.round
    idle_rounds = 0
    for number in range(last + 1, run.settings.run.rounds + 1):
        start = time.monotonic()
        run.federation.await_sites()
        reason = _reason_to_stop(run, callbacks, number)
        if reason:
            say(reason)
            break

        extra_records: dict[str, Any] = {}
        for callback in callbacks:
            extra_records.update(callback.records(run))
        result = train_round(run.strategy, number, run.exchange, run.ask_for_uploads, extra_records)
        last = number
        report_round(run, callbacks, result, start)

        if not result.not_merged:
            idle_rounds = 0
            continue
        idle_rounds += 1
        if idle_rounds == MOST_IDLE_ROUNDS:
            first_reason = _first_reason(run.rows[-idle_rounds:])
            raise FederationError(
                f"{idle_rounds} rounds in a row changed nothing: {result.not_merged}{first_reason}"
                f"; see {run.folder}, where resume.toml lets it go on"
            )
    return last


def _evaluate(run: ActiveRun, callbacks: list[Callback], last: int) -> None:
    """Do the final evaluation, after round ``last``, and end the run."""
    start = time.monotonic()
    run.federation.await_sites()
    result = final_evaluation(run.strategy, last, run.exchange, run.ask_for_uploads)
    if result.not_merged or not result.reports:
        reasons = []
        if result.not_merged:
            reasons.append(result.not_merged)
        for site, reason in {**result.exchanged.failed, **result.refused}.items():
            reasons.append(f"{site}: {reason}")
        why = "; ".join(reasons) or "silence"
        raise FederationError(
            f"no valid reply to the final evaluation ({why}); resume.toml repeats it"
        )

    row = report_round(run, callbacks, result, start)
    for callback in callbacks:
        callback.on_end(run, row, result)


def _reason_to_stop(run: ActiveRun, callbacks: list[Callback], number: int) -> str:
    """Return the first callback's reason to end the run before round ``number``, or ""."""
    for callback in callbacks:
        reason = callback.why_stop(run, number)
        if reason:
            return reason
    return ""


def _first_reason(rows: Sequence[RoundRow]) -> str:
    """Say why the first reply of these rounds that was lost was so; "" if none was."""
    for row in rows:
        for _, _, reason in unused_replies(row):
            return f"; the first reason: {reason}"
    return ""


def report_round(
    run: ActiveRun, callbacks: list[Callback], result: RoundResult, start: float
) -> RoundRow:
    """Hand the result of an exchange that began at ``start`` to the callbacks.

    Returns its line of ``metrics.jsonl``.
    """
    epsilon = planned_epsilon(run, result.number, result.final)
    row = row_of(result, run.strategy, epsilon, time.monotonic() - start)
    for callback in callbacks:
        callback.on_round(run, row, result)
    return row
