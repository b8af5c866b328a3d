"""SCAFFOLD, three rounds: Eq. 3 to 5 by hand, the client's variate by option II."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(
    weights=True, beside={"control": "change"}, keeps=("own", "change"), acts={"server-lr": 0.5}
)

Variate = list[torch.Tensor]


class SCAFFOLDClient(plain.PlainClient):
    own: Variate

    def train(
        self, number: int, weights: plain.State, common: Variate
    ) -> tuple[plain.State, Variate]:
        """y ← y − η (∇F − c_i + c); c_i⁺ = c_i − c + (x − y) / (K η).

        Returns y and c_i⁺ − c_i.
        """
        model = self.model_of("global")
        model.load_state_dict(weights)
        parameters = list(model.parameters())
        start = [p.detach().clone() for p in parameters]
        steps = 0
        for batch in self.batches(number):
            loss = plain.cross_entropy(model(self.x[batch]), [self.y[i] for i in batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g, own, c in zip(parameters, gradients, self.own, common, strict=True):
                    p.sub_(self.lr * (g - own + c))
            steps += 1

        renewed = []
        for own, c, x, y in zip(self.own, common, start, parameters, strict=True):
            renewed.append(own - c + (x - y.detach()) / (steps * self.lr))
        change = [new - old for new, old in zip(renewed, self.own, strict=True)]
        self.own = renewed
        return plain.copied(model), change


@pytest.mark.parametrize(("arch", "server_lr"), [("htcnn-3", 0.7), ("resnet4-imagenet-stem", 1.5)])
def test_three_rounds_equal_an_independent_script(
    arch: str, server_lr: float, tmp_path: Path
) -> None:
    """Clients weigh alike though they have other numbers of samples; buffers have rate 1."""
    more = {
        "rounds": 3,
        "momentum": 0.0,
        "feature_dim": 16,
        "scaffold__server_lr": server_lr,
        **plain.UNEQUAL,
    }
    outcome, clients = plain.side_by_side(tmp_path, SCAFFOLDClient, arch, algo="scaffold", **more)
    assert len({len(client.y) for client in clients}) > 1
    first = clients[0].model_of("global")
    weights = plain.copied(first)
    parameters = dict(first.named_parameters())
    common = [torch.zeros_like(p) for p in first.parameters()]
    for client in clients:
        client.own = [torch.zeros_like(c) for c in common]
    for number in (1, 2, 3):
        sent = [client.train(number, weights, common) for client in clients]
        mean = plain.averaged([model for model, _ in sent], [1] * plain.CLIENTS)
        for name in parameters:
            mean[name] = weights[name] + server_lr * (mean[name] - weights[name])
        weights = mean
        changes = zip(*(change for _, change in sent), strict=True)
        common = [
            c + sum(of_all) / plain.CLIENTS for c, of_all in zip(common, changes, strict=True)
        ]

    left = load_file(outcome.folder / "weights.safetensors")
    floats = {name: value for name, value in left.items() if value.is_floating_point()}
    plain.assert_close(floats, {name: weights[name] for name in floats})
