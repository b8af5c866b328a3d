"""When the privacy that a run may cost is spent."""

from __future__ import annotations

from protofl_common.config.options import SettingsError
from protofl_common.lineage import Lineage
from protofl_common.privacy.plan import Plan
from server_app.network.membership import Federation
from server_app.run.console import say


class Budget:
    """What a run's messages cost the client with the fewest training samples, the others less: it needs no state.

    Every client counts as if it took part in every round. A run that was resumed may have repeated the round that it
    stopped in, so each resumption counts as a round more. Each client keeps an account of its own (`client_app`).
    """

    def __init__(self, federation: Federation, lineage: Lineage) -> None:
        self.federation, self.repeated = federation, len(lineage.earlier)

    def spent(self, rounds: int) -> float | None:
        """ε after so many rounds; None where nothing is private."""
        if (plan := self._plan()) is None:
            return None
        return plan.epsilon(rounds + self.repeated) if rounds else 0.0

    def allows(self, number: int) -> bool:
        """Whether the round ``number`` keeps ``dp-epsilon``; SettingsError where not even the first one does."""
        if (spent := self.spent(number)) is None:
            return True
        most = self.federation.settings.privacy.dp_epsilon
        if spent <= most:
            return True
        if number == 1:
            raise SettingsError(f"dp-epsilon = {most:g}: the first round would cost ε = {spent:.3g}; raise dp-noise")
        say(f"the privacy budget is spent: round {number} would bring ε to {spent:.3g}, above dp-epsilon = {most:g}")
        return False

    def _plan(self) -> Plan | None:
        fewest = min(card.train_samples for card in self.federation.cards.values())
        return self.federation.settings.plan(fewest)
