"""FedDyn, three rounds: Algorithm 1 by hand, with the gradient g_k of every client."""

from pathlib import Path

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True, keeps=("own", "change"), acts={"alpha": 0.1})

Gradient = list[torch.Tensor]


class FedDynClient(plain.PlainClient):
    gradient: Gradient

    def train(self, number: int, weights: plain.State) -> plain.State:
        """∇[L_k − ⟨g_k, θ⟩ + α/2 ‖θ − θ^t‖²] of each batch; then g_k ← g_k − α (θ_k − θ^t)."""
        self.model = self.model_of("global")
        self.model.load_state_dict(weights)
        start = [p.detach().clone() for p in self.model.parameters()]

        def regularised(batch: list[int]) -> torch.Tensor:
            loss = self.cross_entropy(batch)
            for p, g, w in zip(self.model.parameters(), self.gradient, start, strict=True):
                loss = loss - (g * p).sum() + self.hparams.alpha / 2 * ((p - w) ** 2).sum()
            return loss

        self.sgd(number, loss=regularised)
        moved = [p.detach() - w for p, w in zip(self.model.parameters(), start, strict=True)]
        self.gradient = [
            g - self.hparams.alpha * d for g, d in zip(self.gradient, moved, strict=True)
        ]
        return plain.copied(self.model)


@pytest.mark.parametrize(("alpha", "momentum"), [(0.1, 0.0), (1.0, 0.5)])
def test_three_rounds_equal_an_independent_script(
    alpha: float, momentum: float, tmp_path: Path
) -> None:
    """h ← h − α/m Σ (θ_k − θ^t); θ^{t+1} = mean of θ_k − h/α."""
    settings = {
        "rounds": 3,
        "momentum": momentum,
        "feature_dim": 16,
        "feddyn__alpha": alpha,
        **plain.UNEQUAL,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedDynClient, algo="feddyn", **settings)

    weights = plain.copied(clients[0].model_of("global"))
    for client in clients:
        client.gradient = [torch.zeros_like(p) for p in client.model_of("global").parameters()]
    h = {name: torch.zeros_like(value) for name, value in weights.items()}
    for number in (1, 2, 3):
        sent = [client.train(number, weights) for client in clients]
        for name, before in weights.items():
            h[name] -= alpha / plain.CLIENTS * sum(model[name] - before for model in sent)
        mean = plain.averaged(sent, [1] * plain.CLIENTS)
        weights = {name: value - h[name] / alpha for name, value in mean.items()}

    plain.assert_close(plain.weights_left(outcome), weights)
