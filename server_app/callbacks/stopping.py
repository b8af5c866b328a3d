"""Callbacks that decide which round is the best, and whether a run ends before its last round."""

from protofl_common.basics.text import in_order
from protofl_common.config.options import SettingsError
from protofl_common.runs.folder import FEW_TESTED, RoundRow
from protofl_common.runs.over_clients import figures_of, measured
from protofl_common.wire.records import pack_best
from server_app.callbacks.base import ActiveRun, Callback
from server_app.run.flow import Question
from server_app.run.replies import Exchanged, Records, RoundResult


class BestModel(Callback):
    """With ``keep-best``, tells clients which round is the best.

    The models stay with the clients (`client_app/trained_model.py`).
    """

    def records(self, run: ActiveRun) -> Records:
        return pack_best(run.best) if run.settings.run.keep_best else {}

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        """Tell the clients that trained which round is the best of the whole run."""
        if not run.settings.run.keep_best or not run.best:
            return
        federation = run.federation
        trained = set(federation.sites_to_ask(result.number)) - federation.new_clients
        contents = dict.fromkeys(in_order(trained), pack_best(run.best, final=True))
        # who does not answer changes nothing in the results
        run.exchange.ask(Question("query.best", contents), Exchanged(result.number))


class EarlyStopping(Callback):
    """Ends the run after ``early-stopping`` evaluations without a better one on validation data."""

    def why_stop(self, run: ActiveRun, number: int) -> str:
        """Return why to stop before round ``number``, or "" to go on.

        The run stops if the best evaluation on validation data is at least ``early-stopping``
        rounds older than the last one. Raises SettingsError if the run does not measure the metric,
        or too few clients can on validation data.
        """
        _check_measured(run.settings.run.early_stopping_metric, run.rows)
        patience = run.settings.run.early_stopping
        if not patience:
            return ""

        best = run.best
        if best is None or best["on"] != "validation":
            why = _why_not_validated(run)
            if why:
                how = "set validation-fraction, or mark a part `validation` in your own data"
                raise SettingsError(f"early-stopping = {patience}: {why}; {how}")
            return ""

        evaluated_after = [
            row["evaluated-after-round"]
            for row in run.rows
            if best["metric"] in row.get("validation", {})
        ]
        if max(evaluated_after) - best["after"] < patience:
            return ""
        return (
            f"stopped early after round {number - 1} of {run.settings.run.rounds}: "
            f"{best['metric']} on validation data was the best after round {best['after']} "
            "(early-stopping)"
        )


def _check_measured(metric: str, rows: list[RoundRow]) -> None:
    """Raise SettingsError once the run's figures show that it does not measure ``metric``.

    Nothing is raised before there are figures of trained models, nor in a run with a void round:
    then some metrics may be missing.
    """
    if not metric or not rows or any(row["void"] for row in rows):
        return
    is_of_trained_models = rows[-1]["evaluated-after-round"] > 0
    last_round_has_figures = bool(measured(rows[-1:]))
    if not is_of_trained_models or not last_round_has_figures:
        return
    names = measured(rows)  # of all rounds so far
    if metric in names:
        return
    reason = f"this run measures {', '.join(sorted(names))}"
    kind = metric.partition("/")[0]
    if kind in names:  # for head/auc: the accuracy of the head, but not its AUC
        reason += f"; {FEW_TESTED}"
    raise SettingsError(f"early-stopping-metric = {metric!r}: {reason}")


def _why_not_validated(run: ActiveRun) -> str:
    """Return why there will be no figure on validation data; "" while there may be one."""
    cards = run.federation.cards
    liars = run.federation.bounds.liars
    if run.settings.privacy.sums_only:
        # the samples of single sites are hidden, so only an evaluation shows if there are any
        has_accuracy = any(row["accuracy"] for row in run.rows)
        has_validation = any("validation" in row for row in run.rows)
        if has_accuracy and not has_validation:
            return "no client has validation samples"
    else:
        number = sum(card.validation_samples > 0 for card in cards.values())
        if not number:
            return "no client has validation samples"
        if number <= 2 * liars:  # the liars could outvote the others
            who = f"only {number} of {len(cards)} clients with validation samples"
            return f"{who}, too few for liars = {liars}"

    metric = run.best["metric"] if run.best else ""
    number_training = len(cards) - len(run.federation.new_clients)
    complete = []  # the figures of evaluations in which every training client took part
    for row in run.rows:
        if row["evaluated-after-round"] and row["valid"] >= number_training:
            complete.append(figures_of(row))
    is_tested = any(metric in figures for figures in complete)
    is_validated = any(f"validation/{metric}" in figures for figures in complete)
    if is_tested and not is_validated:
        return f"no client has {metric} on validation data ({FEW_TESTED})"
    return ""
