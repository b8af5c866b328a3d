"""FedTGP, Table 5: what a round costs on the wire."""

from pathlib import Path

import pytest
from torch import nn

from tests.support.communication import CIFAR100, CLIENTS, DIM, numbers_per_round
from tests.support.flops import forward_flops


@pytest.mark.parametrize(("algo", "beside"), [pytest.param("fedproto", 2, marks=pytest.mark.long), ("fedtgp", 1)])
def test_cifar100_costs_what_the_paper_says(tmp_path: Path, algo: str, beside: int) -> None:
    """Σ_i D (C_i + C) floating-point numbers, and beside each prototype its label (FedProto: and count, going up).

    The paper's 1.48 M are of its own division into Dir(0.1) shares; C_i, the classes of a client, differ with it.
    """
    found = numbers_per_round(tmp_path, algo, seed=1)
    assert found.classes_down == CIFAR100
    received = CLIENTS * CIFAR100
    assert found.on_the_wire == DIM * (found.held + received) + beside * found.held + received
    assert found.on_the_wire == pytest.approx(1.48e6, rel=0.05)


def test_operations_by_hand() -> None:
    """A 3×3 convolution, 2 → 4 channels on 6×6 pixels with padding, and 144 → 5 units."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    assert forward_flops(model, (2, 6, 6)) == 2 * (4 * 36 * 2 * 9 + 144 * 5)
