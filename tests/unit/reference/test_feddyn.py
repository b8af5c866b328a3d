"""FedDyn, three rounds: Algorithm 1 by hand, with the gradient g_k of every client."""

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, keeps=("own", "change"), acts={"alpha": 0.1})


class FedDynClient(plain.PlainClient):
    gradient: plain.State

    def train(self, number: int, weights: plain.State) -> plain.State:
        """Descend along ∇[L_k − ⟨g_k, θ⟩ + α/2 ‖θ − θ^t‖²]; then g_k ← g_k − α (θ_k − θ^t)."""
        alpha = self.hparams.alpha
        self.model.load_state_dict(weights)

        def regularised(batch: list[int]) -> torch.Tensor:
            """Return the cross-entropy minus ⟨gradient, p⟩ plus α/2 times the squared move."""
            loss = self.cross_entropy(batch)
            for name, p in self.model.named_parameters():
                moved = p - weights[name]
                loss = loss - (self.gradient[name] * p).sum()
                loss = loss + alpha / 2 * (moved**2).sum()
            return loss

        self.sgd(number, loss=regularised)
        trained = plain.copied(self.model)
        for name, value in trained.items():
            self.gradient[name] = self.gradient[name] - alpha * (value - weights[name])
        return trained


@pytest.mark.parametrize(("alpha", "momentum"), [(0.1, 0.0), (1.0, 0.5)])
def test_three_rounds_equal_an_independent_script(alpha, momentum, tmp_path):
    """h ← h − α/m Σ (θ_k − θ^t); θ^{t+1} = mean of θ_k − h/α."""
    settings = {"rounds": 3, "momentum": momentum, "feddyn__alpha": alpha, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, FedDynClient, algo="feddyn", **settings)

    weights = plain.copied(clients[0].model)
    h = {name: torch.zeros_like(value) for name, value in weights.items()}
    for client in clients:
        client.gradient = dict(h)
    for number in (1, 2, 3):
        sent = [client.train(number, weights) for client in clients]
        mean = plain.averaged(sent, [1] * plain.CLIENTS)
        for name, before in weights.items():
            h[name] = h[name] - alpha * (mean[name] - before)
        weights = {name: value - h[name] / alpha for name, value in mean.items()}

    plain.assert_weights_left(outcome, weights)
