"""The accountant against Google's dp-accounting, and against arithmetic by hand."""

import math

import numpy as np
import pytest

from protofl_common.config.options import SettingsError
from protofl_common.privacy.plan import (
    FIGURES_SHARE,
    ORDERS,
    TABLES_SHARE,
    Mechanism,
    _renyi,
    epsilon,
    least_noise,
    plan_of,
)
from tests.support.models import privacy

CASES = [
    [Mechanism(1.0, 2.68, 20)],
    [Mechanism(0.1, 1.0, 200)],
    [Mechanism(0.01, 0.8, 5000)],
    [Mechanism(0.3, 1.5, 60), Mechanism(1.0, 5.0, 20)],
    [Mechanism(0.05, 4.0, 1)],
]


DELTA = 1e-5


@pytest.fixture
def dp_accounting():
    return pytest.importorskip("dp_accounting")


def composed(dp_accounting, accountant, mechanisms):
    """Return the ε that an accountant of dp-accounting has for these mechanisms."""
    for mechanism in mechanisms:
        gaussian = dp_accounting.GaussianDpEvent(mechanism.noise)
        sampled = dp_accounting.PoissonSampledDpEvent(mechanism.rate, gaussian)
        accountant.compose(sampled, mechanism.times)
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize("mechanisms", CASES)
def test_epsilon_is_that_of_dp_accounting_to_three_digits(mechanisms, dp_accounting):
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS)
    theirs = composed(dp_accounting, accountant, mechanisms)

    assert epsilon(mechanisms, DELTA) == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("mechanisms", CASES[:2])
def test_epsilon_is_never_below_the_tight_one(mechanisms, dp_accounting):
    """The tight ε follows from the distribution of the privacy loss (PLD), ours from Rényi's."""
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    tight = composed(dp_accounting, accountant, mechanisms)

    assert tight <= epsilon(mechanisms, DELTA) <= 1.2 * tight


WHOLE = np.arange(-4000, 4001)
FEW_ORDERS = [order for order in ORDERS if order <= 32]


def log_discrete_gaussian(deviation, middle):
    """Return the logarithms of its chances at the `WHOLE` numbers, around ``middle``."""
    exponents = -((WHOLE - middle) ** 2) / (2 * deviation**2)
    return np.asarray(exponents - np.logaddexp.reduce(exponents))


def divergence(log_p, log_q, order):
    """Return the Rényi divergence of P from Q."""
    terms = order * log_p + (1 - order) * log_q
    return float(np.logaddexp.reduce(terms)) / (order - 1)


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.01])
@pytest.mark.parametrize("noise", [0.6, 1.0, 5.0])
@pytest.mark.parametrize("steps", [1, 7, 64])
def test_the_discrete_gaussian_costs_what_is_counted(rate, noise, steps):
    """Its Rényi divergence, summed over all whole numbers, is what the accountant counts.

    A sample, which is drawn with the chance ``rate``, moves the sum by ``steps`` of the grid. To
    add one costs exactly what is counted, to remove one at most that.
    """
    without = log_discrete_gaussian(noise * steps, 0)
    shifted = log_discrete_gaussian(noise * steps, steps)
    sampled = shifted
    if rate < 1:
        sampled = np.logaddexp(math.log1p(-rate) + without, math.log(rate) + shifted)
    counted = dict(zip(ORDERS, _renyi(rate, noise), strict=True))

    for order in FEW_ORDERS:
        assert divergence(sampled, without, order) == pytest.approx(counted[order], rel=1e-6)
        assert divergence(without, sampled, order) <= counted[order] * (1 + 1e-6)


@pytest.mark.parametrize("sites", [2, 4])
@pytest.mark.parametrize("part_of_each", [2.0, 20.0])
def test_the_noise_of_several_sites_costs_what_that_of_one_would(sites, part_of_each):
    """Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism", 2021.

    ``part_of_each``: the deviation, in steps, of the noise that a site adds.
    """
    whole = np.arange(-700, 701)
    of_one = np.exp(-(whole**2) / (2 * part_of_each**2))
    of_all = np.ones(1)
    for _ in range(sites):
        of_all = np.convolve(of_all, of_one / of_one.sum())
    steps = math.ceil(part_of_each)
    noise = part_of_each * math.sqrt(sites) / steps
    is_common = (of_all[steps:] > 1e-250) & (of_all[:-steps] > 1e-250)  # where floats have both
    log_shifted = np.log(of_all[:-steps][is_common])
    log_without = np.log(of_all[steps:][is_common])
    counted = dict(zip(ORDERS, _renyi(1.0, noise), strict=True))
    for order in range(2, 9):
        found = divergence(log_shifted, log_without, order)
        assert found == pytest.approx(counted[order], rel=1e-6)


def test_one_gaussian_by_hand():
    """Its Rényi divergence of order a is a / (2 σ²); σ is 2. ε is the least of all orders."""
    of_orders = []
    for a in ORDERS:
        to_epsilon = math.log(1 - 1 / a) - (math.log(DELTA) + math.log(a)) / (a - 1)
        of_orders.append(a / 8 + to_epsilon)

    assert epsilon([Mechanism(1.0, 2.0, 1)], DELTA) == pytest.approx(min(of_orders), rel=1e-12)
    assert epsilon([], DELTA) == 0


def test_the_least_noise_keeps_the_budget():
    """One percent less noise would cost more than ε = 3."""

    def mechanisms(noise):
        return [Mechanism(0.1, noise, 100)]

    noise = least_noise(mechanisms, DELTA, 3.0, "dp-epsilon = 3")

    assert epsilon(mechanisms(noise), DELTA) <= 3
    assert epsilon(mechanisms(0.99 * noise), DELTA) > 3
    with pytest.raises(SettingsError, match="dp-epsilon = 1e-06: no noise is large enough"):
        least_noise(lambda noise: [Mechanism(1.0, noise, 100)], DELTA, 1e-6, "dp-epsilon = 1e-06")


def test_a_plan_spends_its_budget_in_all_rounds_and_not_more():
    """Seven rounds of three epochs, each with a table and an evaluation."""
    work = {"batch_size": 10, "epochs": 3, "tables": (1,) * 7, "evaluate_every": 1}
    plan = plan_of(privacy(dp_epsilon=2.0), 95, **work)

    assert plan.steps == 30  # of a round: ten of an epoch of 95 samples
    assert plan.rate == pytest.approx(10 / 95)

    mechanisms = []
    for number in range(1, 8):
        mechanisms += plan.costs_of_round(number, True)

    assert epsilon(mechanisms, DELTA) == pytest.approx(plan.epsilon(7))
    assert plan.epsilon(5, repeated=2) == pytest.approx(plan.epsilon(7))

    # two evaluations more are what it leaves room for
    whole = epsilon([*mechanisms, *plan.costs_of_evaluation(), *plan.costs_of_evaluation()], DELTA)

    assert 1.95 < plan.epsilon(7, final=True) < whole <= 2 < plan.epsilon(8, final=True)


@pytest.mark.parametrize(
    ("epochs", "tables"), [(0, (1,) * 5), (1, (0,) * 5), (1, (0, 0, 0, 0, 1)), (0, (0,) * 5)]
)
@pytest.mark.parametrize("evaluate_every", [0, 1, 5])
def test_what_is_not_sent_costs_nothing(epochs, tables, evaluate_every):
    """``tables``: how many tables each of five rounds sends; 0 epochs: no step of DP-SGD."""
    plan = plan_of(privacy(dp_epsilon=2.0), 100, 10, epochs, tables, evaluate_every)
    evaluates = evaluate_every > 0
    evaluated = range(1, 6, evaluate_every) if evaluates else ()
    mechanisms = []
    for number in range(1, 6):
        mechanisms += plan.costs_of_round(number, number in evaluated)

    noises = {mechanism.noise for mechanism in mechanisms}

    # one noise for steps, one for tables, one for evaluations
    assert len(noises) == [epochs > 0, any(tables), evaluates].count(True)
    assert epsilon(mechanisms, DELTA) == pytest.approx(plan.epsilon(5))

    spent = plan.epsilon(5, final=evaluates)

    assert spent <= 2

    if epochs or any(tables):
        assert spent > 1.9


@pytest.mark.parametrize("samples", [1, 20, 64, 65, 5000])
def test_each_part_of_a_plan_stays_within_its_share(samples):
    """Evaluations and tables alone cost no more than their shares of ε = 4."""
    plan = plan_of(privacy(dp_epsilon=4.0), samples, 64, 1, (1,) * 6, 2)
    evaluations = 3 + 2  # after every second of six rounds, and two that no round plans
    figures = [Mechanism(1.0, plan.figure_noise, evaluations)]
    tables = [Mechanism(1.0, plan.table_noise, 6)]

    assert epsilon(figures, DELTA) <= 4 * FIGURES_SHARE
    assert epsilon(tables, DELTA) <= 4 * TABLES_SHARE
    assert plan.epsilon(6, final=True) <= 4
