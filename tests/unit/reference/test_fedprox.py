"""FedProx, two rounds: the proximal term's gradient by hand, the models' mean by samples."""

import pytest

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, losses=("cross-entropy", "proximal"), acts={"mu": 1.0})


class FedProxClient(plain.PlainClient):
    def train(self, number: int, weights: plain.State) -> plain.State:
        """Descend along ∇h = ∇F + μ (w − w^t); note μ/2 ‖w − w^t‖² for every sample."""
        self.model.load_state_dict(weights)
        velocity = plain.zeros(self.model)
        self.proximal = []
        for batch in self.batches(number):
            loss = self.cross_entropy(batch)

            squares = 0.0
            for name, w in plain.copied(self.model).items():
                apart = (w - weights[name]).double()
                squares += float((apart**2).sum())
            self.proximal += len(batch) * [self.hparams.mu / 2 * squares]

            self.step(loss, self.model, velocity, weights.values(), self.hparams.mu)
        return plain.copied(self.model)


@pytest.mark.parametrize("mu", [0.1, 5.0])
def test_two_rounds_equal_an_independent_script(mu, tmp_path):
    """The global weights are the script's, and each client reports its mean proximal term."""
    settings = {"fedprox__mu": mu, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, FedProxClient, algo="fedprox", **settings)

    weights = plain.after_rounds(clients, plain.copied(clients[0].model))

    plain.assert_weights_left(outcome, weights)
    for client in clients:
        reported = outcome.rows[1]["clients"][client.name]["losses"]["proximal"]
        mean = sum(client.proximal) / len(client.proximal)
        assert reported == pytest.approx(mean, rel=1e-3)
        assert reported > 0
