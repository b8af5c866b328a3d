"""FedPer, two rounds: base layers averaged, personal ones each client's own, never on the wire."""

import pytest

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, stays=("head.",), acts={"personal-layers": 2})

PERSONAL = {
    1: ("head.weight", "head.bias"),
    2: ("head.weight", "head.bias", "body.7.weight", "body.7.bias"),
}
"""The personal layers of htcnn-3, which is a convolution, two linear layers, and the head."""


@pytest.mark.parametrize("layers", PERSONAL)
def test_two_rounds_equal_an_independent_script(layers, tmp_path):
    """The averaged base layers and the clients' models are the script's."""
    more = {"fedper__personal_layers": layers, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, plain.SharingClient, algo="fedper", **more)
    base = plain.copied(clients[0].model)
    for name in PERSONAL[layers]:
        del base[name]

    base = plain.after_rounds(clients, base)

    plain.assert_weights_left(outcome, base)
    plain.assert_models_left(outcome, clients, base)
    plain.assert_only_weights_travel(outcome, base)
