"""FedProx, two rounds: the proximal term's gradient by hand, the models' mean by samples."""

from pathlib import Path

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, losses=("cross-entropy", "proximal"), acts={"mu": 1.0})


class FedProxClient(plain.PlainClient):
    def train(self, number: int, weights: plain.State) -> plain.State:
        """Descend along ∇h = ∇F + μ (w − w^t); note μ/2 ‖w − w^t‖² for every sample."""
        model = self.model_of("global")
        model.load_state_dict(weights)
        start = [p.detach().clone() for p in model.parameters()]
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        self.proximal = []
        for batch in self.batches(number):
            loss = plain.cross_entropy(model(self.x[batch]), [self.y[i] for i in batch])

            squares = 0.0
            for p, w in zip(model.parameters(), start, strict=True):
                squares += float(((p.detach() - w).double() ** 2).sum())
            self.proximal += len(batch) * [self.hparams.mu / 2 * squares]

            self.step(loss, model, velocity, start, self.hparams.mu)
        return plain.copied(model)


@pytest.mark.parametrize("mu", [0.1, 5.0])
def test_two_rounds_equal_an_independent_script(mu: float, tmp_path: Path) -> None:
    """The global weights are the script's, and each client reports its mean proximal term."""
    settings = {"fedprox__mu": mu, "feature_dim": 16, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, FedProxClient, algo="fedprox", **settings)

    weights = plain.two_rounds(clients, plain.copied(clients[0].model_of("global")))

    plain.assert_close(plain.weights_left(outcome), weights)
    for client in clients:
        reported = outcome.rows[1]["clients"][client.name]["losses"]["proximal"]
        mean = sum(client.proximal) / len(client.proximal)
        assert reported == pytest.approx(mean, rel=1e-3)
        assert reported > 0
