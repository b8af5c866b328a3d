"""The noise that a run's messages need under differential privacy, and their cost by round.

In a round a client evaluates what it has received, trains by DP-SGD
(`client_app/protections/private_step.py`), and sends a table of class sums or counts. Noise is
added to the numbers of right predictions, to the gradients and to the table (`release.py`); all
rounds and the final evaluation are composed by the accountant: Rényi differential privacy of the
sampled Gaussian mechanism.

Symbols: q the rate at which a sample takes part (Poisson sampling: each by itself); σ the noise
multiplier, the noise's standard deviation over the most that one sample can change; α an order; δ.

    RDP (q = 1)     ε_α = α / (2 σ²)
    RDP (q < 1)     ε_α = 1/(α−1) · log Σ_k C(α, k) (1−q)^(α−k) q^k exp((k² − k) / (2 σ²)), whole α
                    (Mironov, Talwar and Zhang, "Rényi Differential Privacy of the Sampled Gaussian
                    Mechanism", 2019)
    Composition     ε_α add up
    (ε, δ)          ε = min over α of ε_α + log(1 − 1/α) − (log δ + log α) / (α−1)
                    (Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy",
                    2020, Proposition 12)

Noise is drawn rounded to whole steps of a grid on which exact values lie too (`grid.py`): that is
rounding the result of the Gaussian mechanism, so these bounds hold for it.

Two data sets are neighbours if they differ in one sample of one client, of its training, test or
validation part, which in one of them counts nothing; how many samples each part has is public.
Where persons count (`persons.py`), read person for sample. Only whole orders are tried, which makes
ε a little too large, never too small.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofl_common.config.options import SettingsError
from protofl_common.config.sections import PrivacySettings

ORDERS = (*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512)
FIGURES_SHARE = 0.25
TABLES_SHARE = 0.5
"""The parts of ε that the evaluations, and the tables, may cost alone where something else is to
follow: a quarter makes the noise on gradients 3 to 5 % larger. Costs are added as if a sample could
be of the training and of the test part, so nothing depends on who divides the data."""
UNPLANNED = 2  # evaluations beside the rounds': the final one, and one repeated after a stop
LARGEST_NOISE = 1e6


class Mechanism(NamedTuple):
    """Gaussian noise on a sum over samples, ``times`` times."""

    rate: float  # q
    noise: float  # σ
    times: int


def epsilon(mechanisms: Iterable[Mechanism], delta: float) -> float:
    """Return ε at δ of all mechanisms together; 0 if there are none.

    The equations are "Composition" and "(ε, δ)" at the top of this file.
    """
    rdp = np.zeros(len(ORDERS))
    for rate, noise, times in mechanisms:
        if times:
            rdp = rdp + times * _renyi(rate, noise)
    if not rdp.any():
        return 0.0
    orders = np.array(ORDERS, dtype=float)
    delta_terms = (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float((rdp + np.log1p(-1 / orders) - delta_terms).min()))


def least_noise(
    spent: Callable[[float], Iterable[Mechanism]], delta: float, most: float, what: str
) -> float:
    """Search for the least σ, to a thousandth, with which ``spent(σ)`` costs ε = ``most`` at most.

    SettingsError if none up to `LARGEST_NOISE` is large enough; it names the setting ``what``.
    """
    low = 0.0
    high = 1.0
    while epsilon(spent(high), delta) > most:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise SettingsError(f"{what}: no noise is large enough")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if epsilon(spent(middle), delta) <= most:
            high = middle
        else:
            low = middle
    return high


@cache
def _renyi(rate: float, noise: float) -> NDArray[Any]:
    """Return ε_α of a mechanism that runs once, at each of the `ORDERS`."""
    if rate >= 1:
        return np.array(ORDERS, dtype=float) / (2 * noise**2)
    return np.array([_of_order(order, rate, noise) for order in ORDERS])


def _of_order(order: int, rate: float, noise: float) -> float:
    """Return ε_α of the sampled Gaussian mechanism that runs once, for a whole ``order`` α.

    The equation is "RDP (q < 1)" at the top of this file; the sum over k is one of logarithms.
    """
    k = np.arange(order + 1)
    rest = order - k
    log_binomials = _LOG_FACTORIALS[order] - _LOG_FACTORIALS[k] - _LOG_FACTORIALS[rest]
    log_drawn = k * math.log(rate)
    log_not_drawn = rest * math.log1p(-rate)
    log_chances = log_binomials + log_not_drawn + log_drawn
    exponents = (k * k - k) / (2 * noise**2)
    log_moment = np.logaddexp.reduce(log_chances + exponents)
    return float(log_moment) / (order - 1)


_LOG_FACTORIALS = np.array([math.lgamma(n + 1) for n in range(ORDERS[-1] + 1)])


@dataclass(frozen=True)
class Plan:
    """The privacy cost of one client's messages."""

    privacy: PrivacySettings
    samples: int  # N, its training samples, or the persons that they are of
    rate: float  # q: the part of them that is expected in a batch
    batches: int  # steps of DP-SGD in an epoch
    epochs: int  # in a round
    tables: tuple[int, ...]  # how many tables of classes it sends, for each round of the run
    evaluate_every: int  # rounds from one evaluation to the next; 0: none is sent

    @property
    def steps(self) -> int:
        """Steps of DP-SGD in a round."""
        return self.batches * self.epochs

    @property
    def part_of_each(self) -> float:
        """The part of the noise's deviation that one client adds to a secure sum.

        Variances add up, so ``dp-honest-sites`` clients add the whole deviation together.
        """
        return 1 / math.sqrt(self.privacy.dp_honest_sites)

    @cached_property
    def figure_noise(self) -> float:
        """σ of the numbers of right predictions of an evaluation; 0 if none is sent.

        All evaluations of the run, and `UNPLANNED` ones, cost `FIGURES_SHARE` of ε together, or all
        of it where the client sends nothing else that costs ε.
        """
        if not self.evaluate_every:
            return 0.0
        rounds = len(self.tables)
        evaluations = self._evaluations(rounds) + UNPLANNED
        sends_more = self.steps > 0 or sum(self.tables) > 0
        share_of_epsilon = FIGURES_SHARE if sends_more else 1
        return self._least(share_of_epsilon, lambda noise: [Mechanism(1.0, noise, evaluations)])

    @cached_property
    def table_noise(self) -> float:
        """σ of the tables; 0 if none is sent.

        Beside DP-SGD they cost `TABLES_SHARE` of ε alone. In a run without it they get all of ε
        that evaluations leave.
        """
        tables = sum(self.tables)
        if not tables:
            return 0.0
        if self.steps:
            return self._least(TABLES_SHARE, lambda noise: [Mechanism(1.0, noise, tables)])
        no_steps = 0.0  # the σ of DP-SGD, which does not take place
        return self._least(1, lambda noise: self._whole_run(no_steps, noise))

    @cached_property
    def noise(self) -> float:
        """σ of DP-SGD, which gets all of ε that evaluations and tables leave; 0 without a step."""
        if not self.steps:
            return 0.0
        return self._least(1, lambda noise: self._whole_run(noise, self.table_noise))

    def costs_of_round(self, number: int, evaluates: bool) -> list[Mechanism]:
        """Return what a client's answer in round ``number``, from 1 on, costs."""
        training = Mechanism(self.rate, self.noise, self.steps)
        table = Mechanism(1.0, self.table_noise, self.tables[number - 1])
        costs = [training, table]
        if evaluates:
            costs += self.costs_of_evaluation()
        return [cost for cost in costs if cost.times]

    def costs_of_evaluation(self) -> list[Mechanism]:
        return [Mechanism(1.0, self.figure_noise, 1)]

    def epsilon(self, rounds: int, final: bool = False, repeated: int = 0) -> float:
        """Return ε at ``dp-delta`` after ``rounds``, some of which were made twice.

        ``final``: with the final evaluation. ``repeated``: how many rounds were made again, as the
        run was stopped and resumed.
        """
        costs = self._spent(self.noise, self.table_noise, rounds, int(final), repeated)
        return epsilon(costs, self.privacy.dp_delta)

    def _evaluations(self, rounds: int) -> int:
        """Return in how many of the first ``rounds`` clients evaluate, beginning with round 1."""
        return math.ceil(rounds / self.evaluate_every) if self.evaluate_every else 0

    def _whole_run(self, noise: float, table_noise: float) -> list[Mechanism]:
        """Return what all rounds cost with σ = ``noise`` for steps and ``table_noise`` for tables.

        `UNPLANNED` evaluations are among the costs.
        """
        return self._spent(noise, table_noise, len(self.tables), UNPLANNED, repeated=0)

    def _spent(
        self, noise: float, table_noise: float, rounds: int, further_evaluations: int, repeated: int
    ) -> list[Mechanism]:
        """Return what the first ``rounds`` cost, and ``further_evaluations`` beside theirs.

        A round that is ``repeated`` counts as one that evaluates, with the most tables.
        """
        tables = sum(self.tables[:rounds]) + repeated * max(self.tables)
        evaluations = 0
        if self.evaluate_every:
            evaluations = self._evaluations(rounds) + further_evaluations + repeated
        costs = [
            Mechanism(self.rate, noise, (rounds + repeated) * self.steps),
            Mechanism(1.0, table_noise, tables),
            Mechanism(1.0, self.figure_noise, evaluations),
        ]
        return [cost for cost in costs if cost.times]

    def _least(self, share: float, spent: Callable[[float], list[Mechanism]]) -> float:
        """Return the least σ with which ``spent(σ)`` costs this ``share`` of dp-epsilon at most.

        SettingsError, which names dp-epsilon, if no noise is large enough.
        """
        of_run = self.privacy.dp_epsilon
        return least_noise(spent, self.privacy.dp_delta, share * of_run, f"dp-epsilon = {of_run:g}")


@cache
def plan_of(
    privacy: PrivacySettings,
    samples: int,
    batch_size: int,
    epochs: int,
    tables: tuple[int, ...],
    evaluate_every: int,
) -> Plan:
    """Return the plan of a client with so many training ``samples``, or persons that they are of.

    ``epochs`` are those of a round; ``tables``: how many tables of classes the client sends in each
    round of the run; ``evaluate_every``: rounds from one evaluation to the next, 0 for none. Equal
    arguments get the same object, which keeps the noise that it has searched for: that is slow.
    """
    rate = min(1.0, batch_size / max(1, samples))
    batches = max(1, math.ceil(samples / batch_size))
    return Plan(privacy, samples, rate, batches, epochs, tables, evaluate_every)
