"""The end of a run whose figures on validation data no longer get better (``early-stopping``)."""

from __future__ import annotations

from protofl_common.config.options import SettingsError
from protofl_common.runs.metrics import has_stalled
from server_app.callbacks.base import Callback, Run


class EarlyStopping(Callback):
    """Ends the run after ``early-stopping`` evaluations without a better one."""

    def why_stop(self, run: Run, number: int) -> str:
        """Compare the figures; SettingsError for a metric that the run does not measure, or too few that measure it."""
        chosen = run.settings.run
        if has_stalled(run.rows, chosen.early_stopping_metric, chosen.early_stopping) and (best := run.best):
            since = f"{best['metric']} on validation data was the best after round {best['after']}"
            return f"stopped early after round {number - 1} of {chosen.rounds}: {since} (early-stopping)"
        if chosen.early_stopping:
            self._check(run)
        return ""

    def _check(self, run: Run) -> None:
        """With secure aggregation the first evaluation shows who has validation samples, else the introductions."""
        federation, why = run.federation, "no client has validation samples"
        if run.settings.privacy.secagg:
            measured = not any(row["accuracy"] for row in run.rows) or any("validation" in row for row in run.rows)
        else:
            having = sum(card.validation_samples > 0 for card in federation.cards.values())
            measured = having > 2 * (liars := federation.bounds.liars)
            if having and not measured:
                have = "has" if having == 1 else "have"
                who = f"{having} of {len(federation.cards)} clients {have} validation samples"
                why = f"{who}, too few for liars = {liars}"
        if not measured:
            how = "set validation-fraction, or mark a part `validation` in your own data"
            raise SettingsError(f"early-stopping = {run.settings.run.early_stopping}: {why}; {how}")
