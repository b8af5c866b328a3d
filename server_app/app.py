"""The ServerApp: settings -> federation -> rounds -> results."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from protofl_common.basics.files import TensorFileError
from protofl_common.config.options import SettingsError, Values
from protofl_common.data import DataError
from protofl_common.runs.events import Failed, OnEvent, Started
from protofl_common.runs.folder import DROPPED, RoundRow, unused_replies
from server_app.callbacks import callbacks_of
from server_app.callbacks.base import ActiveRun
from server_app.callbacks.budget import planned_epsilon
from server_app.callbacks.metrics import row_of
from server_app.callbacks.progress import conclude, draw_page
from server_app.network.exchange import MessageExchange
from server_app.network.flower_compat import find_messages_by_node
from server_app.network.membership import Federation, FederationError
from server_app.protections.secure_sum import SecureSums
from server_app.round import final_evaluation, train_round
from server_app.run.checkpoint import locked_run, starting_point
from server_app.run.flow import uploads_of
from server_app.run.job import Job, open_jobs
from server_app.run.log import emit, listening, logged, say
from server_app.run.replies import RoundResult
from server_app.strategies.base import build_strategy

app = ServerApp()

EXPECTED = (SettingsError, DataError, FederationError, TensorFileError, OSError)
"""Errors that the user can mend."""
MOST_IDLE_ROUNDS = 3  # Rounds in a row that changed nothing, after which a run gives up


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Do the run that Flower was asked for, and print its events for `flwr run --stream`.

    Errors are printed and raised.
    """
    show = partial(print, flush=True)
    try:
        federate(grid, context.run_config, context.run_id, show)
    except EXPECTED as error:
        show(Failed.of(error, is_expected=True))
        raise


def federate(grid: Grid, run_config: Values, run_id: int, on_event: OnEvent) -> Path:
    """Do a run and its baselines, and return the folder of the run's results.

    ``run_config`` has every key of the run's settings, and ``run_id`` is Flower's. Each event is
    handed to ``on_event``. `EXPECTED` errors are raised without a traceback of the code inside, as
    the user can mend them by their texts.
    """
    find_messages_by_node(grid)
    try:
        with listening(on_event):
            jobs = open_jobs(run_config, run_id)
            return do_all(grid, jobs)
    except EXPECTED as error:
        raise error.with_traceback(None) from None


def do_all(grid: Grid, jobs: Sequence[Job]) -> Path:
    """Do a run and then its baselines, and return the run's folder.

    What a resumed run has finished before is not done again.
    """
    run, *baselines = jobs
    if run.is_complete():
        say(f"{run.folder.name} is complete: nothing of it is left to do")
    else:
        one_run(grid, run)
    for baseline in baselines:
        do_baseline(grid, baseline)
    conclude(run.settings, run.folder)
    return run.folder


def do_baseline(grid: Grid, job: Job) -> None:
    """Do a baseline, unless a resumed run has finished it.

    `EXPECTED` errors are told in a line and not raised, as the run itself is complete and the next
    baseline can be done.
    """
    try:
        if not job.is_complete():
            one_run(grid, job)
    except EXPECTED as error:
        say(f"baseline {job.baseline}: not finished: {error}")


def one_run(grid: Grid, job: Job) -> None:
    """Do a run, or a baseline, from the introductions of its clients to the summary.

    Where it ends early by an error, the page is drawn from the rounds so far.
    """
    with locked_run(job.folder):
        start = starting_point(job.config, job.code, job.folder, job.run_id)
        run = ActiveRun(job, start)
        run.callbacks = callbacks_of(run)
        gather(grid, run)
        try:
            with logged(run.folder / "run.log"):
                run_rounds(run)
        except (FederationError, TensorFileError, OSError):
            report = draw_page(run.settings, run.folder)
            if report:
                say(report)
            raise


def gather(grid: Grid, run: ActiveRun) -> None:
    """Wait for the clients of a run, and build what depends on them.

    That is the algorithm's server half, in the state of the checkpoint, and what asks the clients.
    """
    federation = Federation(grid, run.settings, run.start, run.job.baseline)
    federation.gather()
    run.strategy = build_strategy(federation)
    run.strategy.restore(run.start.state)  # a new run's is empty, and changes nothing
    run.exchange = MessageExchange(federation, run.folder)
    run.ask_for_uploads = uploads_of
    if run.settings.privacy.sums_only:
        run.ask_for_uploads = SecureSums(federation).flow


def run_rounds(run: ActiveRun) -> None:
    """Do all rounds that are left, and the final evaluation.

    Raises FederationError where `_train_rounds` does, and if no site has sent a valid reply in the
    whole run.
    """
    algorithm = run.strategy.row
    emit(Started(run.job.main_folder, algorithm.title, algorithm.paper, bool(run.job.baseline)))
    for callback in run.callbacks:
        callback.on_start(run)
    last = _train_rounds(run)
    # "unused" are valid replies to a secure sum that failed because of other sites
    if not any(row["valid"] or row.get("unused") for row in run.rows):
        reason = _first_reason(run.rows)
        raise FederationError(f"no client has sent one valid reply: nothing was merged{reason}")
    _evaluate(run, last)


def _train_rounds(run: ActiveRun) -> int:
    """Do the rounds that are left, unless a callback ends the run; return the last one's number.

    Raises FederationError after `MOST_IDLE_ROUNDS` in a row that change nothing, and where all
    simulated clients fail for one reason.
    """
    last = run.start.round
    idle_rounds = 0
    for number in range(last + 1, run.settings.run.rounds + 1):
        start = time.monotonic()
        run.federation.await_sites()
        reason = _reason_to_stop(run, number)
        if reason:
            say(reason)
            break

        extra_records: dict[str, Any] = {}
        for callback in run.callbacks:
            extra_records.update(callback.records(run))
        result = train_round(run, number, extra_records)
        last = number
        report_round(run, result, start)

        reason = _failure_of_all(run, result)
        if reason:
            raise FederationError(
                f"all clients failed in round {number}, for one reason: {reason}; when that is "
                f"mended, resume.toml in {run.folder} lets the run go on"
            )
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


def _reason_to_stop(run: ActiveRun, number: int) -> str:
    """Return the first callback's reason to end the run before round ``number``, or ""."""
    for callback in run.callbacks:
        reason = callback.why_stop(run, number)
        if reason:
            return reason
    return ""


def _failure_of_all(run: ActiveRun, result: RoundResult) -> str:
    """Return the reason for which all simulated clients of a round have failed; "" otherwise.

    One reason for several clients is a bug or a wrong setting, which no later round mends. Sites
    with operators cannot end a run by an error.
    """
    if not run.federation.simulated:
        return ""
    outcomes = [result.exchanged.failed.get(site, "") for site in result.exchanged.asked]
    # those that drop out (``drop-rate``) do so on purpose, and were not sent a message
    reasons = [reason for reason in outcomes if reason != DROPPED]
    is_one_reason = len(reasons) > 1 and len(set(reasons)) == 1
    return reasons[0] if is_one_reason else ""


def _evaluate(run: ActiveRun, last: int) -> None:
    """Do the final evaluation after round ``last``, and let the callbacks finish the run.

    Raises FederationError if no reply is valid, or the secure sum of the figures has failed.
    """
    start = time.monotonic()
    run.federation.await_sites()
    result = final_evaluation(run, last)
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

    row = report_round(run, result, start)
    for callback in run.callbacks:
        callback.on_end(run, row, result)


def _first_reason(rows: Sequence[RoundRow]) -> str:
    """Return the end of an error's text: why the first lost reply of these rounds was lost.

    It is "" if none was lost.
    """
    for row in rows:
        for _, _, reason in unused_replies(row):
            return f"; the first reason: {reason}"
    return ""


def report_round(run: ActiveRun, result: RoundResult, start: float) -> RoundRow:
    """Hand the result of a round or the final evaluation to the callbacks, and return its row.

    ``start`` is when it began, on the monotonic clock. The row is its line of ``metrics.jsonl``.
    """
    epsilon = planned_epsilon(run, result.number, result.final)
    row = row_of(result, run.strategy, epsilon, time.monotonic() - start)
    for callback in run.callbacks:
        callback.on_round(run, row, result)
    return row
