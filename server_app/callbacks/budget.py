"""What a run costs of its clients' privacy by its plan, and its end where no client can pay."""

from protofl_common.config.options import SettingsError
from server_app.callbacks.base import ActiveRun, Callback


class Budget(Callback):
    """Ends the run where no client has ε left for another round.

    Each client's own ledger has the last word.
    """

    def why_stop(self, run: ActiveRun, number: int) -> str:
        """Return why to stop before round ``number``, or "" to go on.

        The run stops if that round would cost every client more than its budget, together with the
        final evaluation, which must still be paid after the last round.
        """
        budget = run.settings.privacy.dp_epsilon
        costs = _costs(run, number, final=True)
        if not costs or min(costs) <= budget:  # one client at least can pay
            return ""
        return (
            f"the privacy budget is spent: round {number} would bring ε to {min(costs):.3g}, "
            f"above dp-epsilon = {budget:g}"
        )


def planned_epsilon(run: ActiveRun, rounds: int, final: bool = False) -> float | None:
    """Return the largest ε of a client after ``rounds`` and, with ``final``, the final evaluation.

    It is at most ``dp-epsilon``, beyond which clients refuse. Return None without ``dp``.
    """
    costs = _costs(run, rounds, final)
    return min(max(costs), run.settings.privacy.dp_epsilon) if costs else None


def _costs(run: ActiveRun, rounds: int, final: bool) -> list[float]:
    """Return the ε of a client after ``rounds``, for each number of samples that a client has.

    It is computed as if all took part in every round. A run that was resumed may have repeated the
    round that it stopped in, so each resumption counts as one more round. Return [] without ``dp``.
    Raises SettingsError if ``dp-epsilon`` is too small for all clients.
    """
    costs = []
    refusal = None
    repeated = len(run.start.run_history.earlier)
    for samples in {card.train_samples for card in run.federation.cards.values()}:
        try:
            plan = run.settings.plan(samples)
            if plan:
                costs.append(plan.epsilon(rounds, final, repeated))
        except SettingsError as error:
            # the claim of one client must not end the run; its own ledger refuses
            refusal = error
    if refusal and not costs:
        raise refusal
    return costs
