"""LG-FedAvg, two rounds: heads averaged over different bodies, which never leave their clients."""

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, stays=("body.",))

HEAD = {"head.weight", "head.bias"}


def test_two_rounds_equal_an_independent_script(tmp_path):
    """The averaged heads and the clients' models are the script's; only heads travel.

    The first head comes from the system, as no client begins with it.
    """
    outcome, clients = plain.side_by_side(
        tmp_path,
        plain.SharingClient,
        plain.HETEROGENEOUS,
        algo="lg-fedavg",
        liars=0,
        **plain.UNEQUAL,
    )
    first_message, _ = outcome.exchanged()[0]
    head = plain.after_rounds(clients, plain.tensors(first_message.content["weights"]))

    assert len({len(one.y) for one in clients}) > 1
    plain.assert_weights_left(outcome, head)
    plain.assert_models_left(outcome, clients, head)
    plain.assert_only_weights_travel(outcome, HEAD)
