"""FedPer, two rounds: base layers averaged, personal ones each client's own, never on the wire."""

from pathlib import Path

import pytest

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, stays=("head.",), acts={"personal-layers": 2})

PERSONAL = {
    1: ("head.weight", "head.bias"),
    2: ("head.weight", "head.bias", "body.7.weight", "body.7.bias"),
}
"""Of htcnn-3, which is conv 32 | fc 512, D | fc C."""


@pytest.mark.parametrize("layers", PERSONAL)
def test_two_rounds_equal_an_independent_script(layers: int, tmp_path: Path) -> None:
    more = {"fedper__personal_layers": layers, "feature_dim": 16, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, plain.SharingClient, algo="fedper", **more)
    first = plain.copied(clients[0].model_of("global"))
    base = {name: value for name, value in first.items() if name not in PERSONAL[layers]}
    base = plain.two_rounds(clients, base)

    plain.assert_close(plain.weights_left(outcome), base)
    plain.assert_models_left(
        outcome.folder, {client.name: plain.copied(client.model) | base for client in clients}
    )
    plain.assert_only_weights_travel(outcome, base)
