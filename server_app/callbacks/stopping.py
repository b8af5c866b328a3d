"""The figures decide: which round is the best, and whether a run ends early; or its privacy budget does."""

from protofl_common.basics.text import in_order
from protofl_common.config.options import SettingsError
from protofl_common.runs.folder import FEW_TESTED, RoundRow
from protofl_common.runs.over_clients import figures_of, measured
from protofl_common.wire.records import pack_best
from server_app.callbacks.base import ActiveRun, Callback
from server_app.replies import Records, RoundResult


class BestModel(Callback):
    """With ``keep-best`` clients learn which round is the best; their models stay (`client_app/trained_model.py`)."""

    def records(self, run: ActiveRun) -> Records:
        return pack_best(run.best) if run.settings.run.keep_best else {}

    def on_end(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        if run.settings.run.keep_best and run.best:
            sites = in_order(set(run.federation.answering(result.number)) - run.federation.new_clients)
            contents = dict.fromkeys(sites, pack_best(run.best, final=True))
            run.exchange.ask("query.best", contents, RoundResult(result.number))


class EarlyStopping(Callback):
    """Ends the run after ``early-stopping`` evaluations without a better one on validation data."""

    def why_stop(self, run: ActiveRun, number: int) -> str:
        """Compare the figures; SettingsError for a metric that the run does not measure, or too few that measure it."""
        chosen, rows, best = run.settings.run, run.rows, run.best
        metric, patience = chosen.early_stopping_metric, chosen.early_stopping
        names, merged = sorted(measured(rows)), bool(rows) and not any(row["void"] for row in rows)
        if metric and metric not in names and measured(rows[-1:]) and merged and rows[-1]["evaluated-after-round"]:
            few = f"; {FEW_TESTED}" * (metric.partition("/")[0] in names)
            raise SettingsError(f"early-stopping-metric = {metric!r}: this run measures {', '.join(names)}{few}")
        if patience and best is not None and best["on"] == "validation":
            after = [row["evaluated-after-round"] for row in rows if best["metric"] in row.get("validation", {})]
            if max(after) - best["after"] >= patience:
                since = f"{best['metric']} on validation data was the best after round {best['after']}"
                return f"stopped early after round {number - 1} of {chosen.rounds}: {since} (early-stopping)"
        elif patience and (why := self._unmeasured(run)):
            how = "set validation-fraction, or mark a part `validation` in your own data"
            raise SettingsError(f"early-stopping = {patience}: {why}; {how}")
        return ""

    def _unmeasured(self, run: ActiveRun) -> str:
        """Say why no figure on validation data is to be expected; of sums, the first evaluation shows that."""
        cards, liars = run.federation.cards, run.federation.bounds.liars
        having, sums = sum(card.validation_samples > 0 for card in cards.values()), run.settings.privacy.sums_only
        measured = not any(row["accuracy"] for row in run.rows) or any("validation" in row for row in run.rows)
        if not (measured if sums else having):
            return "no client has validation samples"
        if not sums and having <= 2 * liars:
            who = f"{having} of {len(cards)} clients {'has' if having == 1 else 'have'} validation samples"
            return f"{who}, too few for liars = {liars}"
        everybody, metric = len(cards) - len(run.federation.new_clients), run.best["metric"] if run.best else ""
        rows = [figures_of(row) for row in run.rows if row["evaluated-after-round"] and row["valid"] >= everybody]
        absent = any(metric in row for row in rows) and not any(f"validation/{metric}" in row for row in rows)
        return f"no client has {metric} on validation data ({FEW_TESTED})" if absent else ""


class Budget(Callback):
    """Ends the run where no client has ε left for another round; each client's own ledger has the last word."""

    def why_stop(self, run: ActiveRun, number: int) -> str:
        costs, most = _costs(run, number, True), run.settings.privacy.dp_epsilon
        if not costs or min(costs) <= most:
            return ""
        would = f"round {number} would bring ε to {min(costs):.3g}, above dp-epsilon = {most:g}"
        return f"the privacy budget is spent: {would}"


def epsilon_spent(run: ActiveRun, rounds: int, final: bool = False) -> float | None:
    """ε after so many rounds and, if asked, the final evaluation; None where nothing is private."""
    costs = _costs(run, rounds, final)
    return min(max(costs), run.settings.privacy.dp_epsilon) if costs else None


def _costs(run: ActiveRun, rounds: int, final: bool) -> list[float]:
    """List ε of the clients of each size, as if they took part in every round: it needs no state.

    A run that was resumed may have repeated the round that it stopped in, so each resumption counts as a round more.
    SettingsError where dp-epsilon is too small for all of them.
    """
    costs, refusal, repeated = [], None, len(run.start.run_history.earlier)
    for samples in {card.train_samples for card in run.federation.cards.values()}:
        try:
            if plan := run.settings.plan(samples):
                costs.append(plan.epsilon(rounds, final, repeated))
        except SettingsError as error:  # what one client claims ends nobody's run; its own ledger refuses
            refusal = error
    if refusal and not costs:
        raise refusal
    return costs
