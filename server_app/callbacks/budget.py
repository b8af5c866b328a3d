"""The ε that a run has spent, and the end of its budget."""

from __future__ import annotations

from protofl_common.basics.run_history import RunHistory
from protofl_common.config.options import SettingsError
from server_app.callbacks.base import Callback, Run
from server_app.network.membership import Federation


class Budget(Callback):
    """ε of the client that a run costs most, as if it took part in every round: it needs no state.

    A run that was resumed may have repeated the round that it stopped in, so each resumption counts as a round more.
    A client's own ledger (`client_app`) has the last word: no other client's number of samples can end the run for it.
    """

    def __init__(self, federation: Federation, run_history: RunHistory) -> None:
        self.federation, self.repeated = federation, len(run_history.earlier)

    def spent(self, rounds: int, final: bool = False) -> float | None:
        """ε after so many rounds and, if asked, the final evaluation; None where nothing is private."""
        costs = self._costs(rounds, final)
        return min(max(costs), self.federation.settings.privacy.dp_epsilon) if costs else None

    def why_stop(self, run: Run, number: int) -> str:
        """Stop where no client has ε left for the round ``number`` and the final evaluation."""
        costs, most = self._costs(number, True), self.federation.settings.privacy.dp_epsilon
        if not costs or min(costs) <= most:
            return ""
        would = f"round {number} would bring ε to {min(costs):.3g}, above dp-epsilon = {most:g}"
        return f"the privacy budget is spent: {would}"

    def _costs(self, rounds: int, final: bool) -> list[float]:
        """List ε of the clients of each size; SettingsError where dp-epsilon is too small for all of them."""
        costs, refusal = [], None
        for samples in {card.train_samples for card in self.federation.cards.values()}:
            try:
                if plan := self.federation.settings.plan(samples):
                    costs.append(plan.epsilon(rounds, final, self.repeated))
            except SettingsError as error:  # what one client claims ends nobody's run; its own ledger refuses
                refusal = error
        if refusal and not costs:
            raise refusal
        return costs
