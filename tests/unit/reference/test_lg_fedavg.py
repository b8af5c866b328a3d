"""LG-FedAvg, two rounds: heads averaged over different bodies, which never leave their clients."""

from pathlib import Path

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, stays=("body.",))

ARCHS = ("cnn4", "htcnn-3", "htcnn-1")
HEAD = {"head.weight", "head.bias"}


def test_two_rounds_equal_an_independent_script(tmp_path: Path) -> None:
    unequal = {
        "partition": "dirichlet",
        "alpha": 0.5,
        "train_samples": 0,
        "total_samples": 100,
        "liars": 0,
    }
    more = {"feature_dim": 16, "test_samples": 20, **unequal}
    outcome, clients = plain.side_by_side(
        tmp_path, plain.SharingClient, ARCHS, algo="lg-fedavg", **more
    )
    head = plain.two_rounds(
        clients, plain.tensors(outcome.exchanged()[0][0].content.array_records["weights"])
    )

    assert len({len(one.y) for one in clients}) > 1
    plain.assert_close(plain.weights_left(outcome), head)
    plain.assert_models_left(
        tmp_path, {client.name: plain.copied(client.model) | head for client in clients}
    )
    plain.assert_only_weights_travel(outcome, HEAD)
