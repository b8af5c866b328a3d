"""FedDBE, three rounds: bias memory, mean feature and its regularization again, batch by batch."""

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(
    weights=True,
    beside={"mean": "running"},
    keeps=("memory",),
    losses=("cross-entropy", "mean-regularization"),
    acts={"kappa": 50.0, "momentum": 0.5},
)


class FedDBEClient(plain.PlainClient):
    def train(
        self, number: int, weights: plain.State, consensus: torch.Tensor | None
    ) -> plain.State:
        """The weights θ and the bias memory p move along one gradient.

        The running mean m_i of the features begins anew in every round; it is drawn to the
        ``consensus`` of the clients' means, which there is from round 2 on.
        """
        self.model.load_state_dict(weights)
        if number == 1:
            self.memory = torch.zeros(self.dim, requires_grad=True)
        self.mean = torch.zeros(self.dim)
        velocity = plain.zeros(self.model)
        velocity_of_memory = torch.zeros(self.dim)
        mu = self.hparams.momentum
        for batch in self.batches(number):
            labels = self.labels(batch)
            z = self.model.body(self.x[batch])
            mean = (1 - mu) * self.mean + mu * sum(z) / len(batch)
            self.mean = mean.detach()

            loss = plain.cross_entropy(self.model.head(z + self.memory), labels)
            if consensus is None:  # and the memory is still 0
                self.step(loss, self.model, velocity)
                continue

            squares = [0.5 * (a - b) ** 2 for a, b in zip(mean, consensus, strict=True)]
            loss = loss + self.hparams.kappa * sum(squares) / self.dim
            (gradient,) = torch.autograd.grad(loss, self.memory, retain_graph=True)
            self.step(loss, self.model, velocity)
            velocity_of_memory = self.momentum * velocity_of_memory + gradient
            with torch.no_grad():
                self.memory -= self.lr * velocity_of_memory
        return plain.copied(self.model)

    def left(self, weights: plain.State) -> plain.State:
        """Return the model that is left: with W p added to its head's bias."""
        moved = weights["head.bias"] + weights["head.weight"] @ self.memory.detach()
        return weights | {"head.bias": moved}


@pytest.mark.parametrize(("kappa", "mu", "momentum"), [(50.0, 1.0, 0.0), (5.0, 0.3, 0.5)])
def test_three_rounds_equal_an_independent_script(kappa, mu, momentum, tmp_path):
    """The weights, the consensus of the first round's means, and the models with their memory."""
    settings = {
        "rounds": 3,
        "momentum": momentum,
        "feddbe__kappa": kappa,
        "feddbe__momentum": mu,
        **plain.UNEQUAL,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedDBEClient, algo="feddbe", **settings)

    weights = plain.copied(clients[0].model)
    consensus = None
    for number in (1, 2, 3):
        states = [client.train(number, weights, consensus) for client in clients]
        weights = plain.mean_by_samples(clients, states)
        if consensus is None:
            means = [{"mean": client.mean} for client in clients]
            consensus = plain.mean_by_samples(clients, means)["mean"]

    plain.assert_weights_left(outcome, weights)
    found = plain.server_state_left(outcome)["mean/mean"]
    torch.testing.assert_close(found, consensus, rtol=1e-4, atol=1e-5)
    for client in clients:
        assert client.memory.any()
        plain.assert_close(plain.model_left(outcome.folder, client.name), client.left(weights))
