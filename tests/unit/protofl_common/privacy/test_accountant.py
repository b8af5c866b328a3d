"""The accountant against Google's dp-accounting, and against arithmetic by hand."""

import math

import pytest

from protofl_common.config.options import SettingsError
from protofl_common.privacy.plan import (
    FIGURES_SHARE,
    ORDERS,
    TABLES_SHARE,
    Mechanism,
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


@pytest.mark.parametrize("mechanisms", CASES)
def test_epsilon_is_that_of_dp_accounting_to_three_digits(mechanisms: list[Mechanism]) -> None:
    accounting = pytest.importorskip("dp_accounting")
    oracle = accounting.rdp.RdpAccountant(ORDERS)
    for one in mechanisms:
        oracle.compose(
            accounting.PoissonSampledDpEvent(one.rate, accounting.GaussianDpEvent(one.noise)),
            one.times,
        )
    assert epsilon(mechanisms, 1e-5) == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize("mechanisms", CASES[:2])
def test_epsilon_is_never_below_the_tight_one(mechanisms: list[Mechanism]) -> None:
    accounting = pytest.importorskip("dp_accounting")
    oracle = accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    for one in mechanisms:
        oracle.compose(
            accounting.PoissonSampledDpEvent(one.rate, accounting.GaussianDpEvent(one.noise)),
            one.times,
        )
    tight = oracle.get_epsilon(1e-5)
    assert tight <= epsilon(mechanisms, 1e-5) <= 1.2 * tight


def test_one_gaussian_by_hand_and_the_least_noise_keeps_the_budget() -> None:
    by_hand = min(
        a / 8 + math.log(1 - 1 / a) - (math.log(1e-5) + math.log(a)) / (a - 1) for a in ORDERS
    )
    assert epsilon([Mechanism(1.0, 2.0, 1)], 1e-5) == pytest.approx(by_hand, rel=1e-12)
    assert epsilon([], 1e-5) == 0
    noise = least_noise(lambda one: [Mechanism(0.1, one, 100)], 1e-5, 3.0, "dp-epsilon = 3")
    assert (
        epsilon([Mechanism(0.1, noise, 100)], 1e-5)
        <= 3
        < epsilon([Mechanism(0.1, 0.99 * noise, 100)], 1e-5)
    )
    with pytest.raises(SettingsError, match="dp-epsilon = 1e-06: no noise is large enough"):
        least_noise(lambda one: [Mechanism(1.0, one, 100)], 1e-5, 1e-6, "dp-epsilon = 1e-06")


def test_a_plan_spends_its_budget_in_all_rounds_and_not_more() -> None:
    plan = plan_of(
        privacy(dp_epsilon=2.0), 95, batch_size=10, epochs=3, tables=(1,) * 7, evaluate_every=1
    )
    assert (plan.steps, plan.rate) == (30, pytest.approx(10 / 95))
    mechanisms = [one for number in range(1, 8) for one in plan.of_round(number, True)]
    whole = [
        *mechanisms,
        *plan.of_evaluation(),
        *plan.of_evaluation(),
    ]  # and what it leaves room for
    assert (
        1.95 < plan.epsilon(7, final=True) < epsilon(whole, 1e-5) <= 2 < plan.epsilon(8, final=True)
    )
    assert epsilon(mechanisms, 1e-5) == pytest.approx(plan.epsilon(7))
    assert plan.epsilon(5, repeated=2) == pytest.approx(plan.epsilon(7))


@pytest.mark.parametrize(
    ("epochs", "tables"), [(0, (1,) * 5), (1, (0,) * 5), (1, (0, 0, 0, 0, 1)), (0, (0,) * 5)]
)
@pytest.mark.parametrize("evaluate_every", [0, 1, 5])
def test_what_is_not_sent_costs_nothing(
    epochs: int, tables: tuple[int, ...], evaluate_every: int
) -> None:
    plan = plan_of(privacy(dp_epsilon=2.0), 100, 10, epochs, tables, evaluate_every)
    evaluated = range(1, 6, evaluate_every) if evaluate_every else ()
    mechanisms = [
        one for number in range(1, 6) for one in plan.of_round(number, number in evaluated)
    ]
    assert len({one.noise for one in mechanisms}) == bool(epochs) + bool(any(tables)) + bool(
        evaluate_every
    )
    assert epsilon(mechanisms, 1e-5) == pytest.approx(plan.epsilon(5))
    assert plan.epsilon(5, final=bool(evaluate_every)) <= 2
    assert not (epochs or any(tables)) or plan.epsilon(5, final=bool(evaluate_every)) > 1.9


@pytest.mark.parametrize("samples", [1, 20, 64, 65, 5000])
def test_each_part_of_a_plan_stays_within_its_share(samples: int) -> None:
    plan = plan_of(privacy(dp_epsilon=4.0), samples, 64, 1, (1,) * 6, 2)
    assert epsilon([Mechanism(1.0, plan.figure_noise, 3 + 2)], 1e-5) <= 4 * FIGURES_SHARE
    assert epsilon([Mechanism(1.0, plan.table_noise, 6)], 1e-5) <= 4 * TABLES_SHARE
    assert plan.epsilon(6, final=True) <= 4
