"""SCAFFOLD, three rounds: Eq. 3 to 5 by hand, the client's variate by option II."""

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(
    weights=True, beside={"control": "change"}, keeps=("own", "change"), acts={"server-lr": 0.5}
)


class SCAFFOLDClient(plain.PlainClient):
    own: plain.State

    def train(
        self, number: int, weights: plain.State, common: plain.State
    ) -> tuple[plain.State, plain.State]:
        """Take the K steps y ← y − η (∇F − c_i + c) from the global weights x.

        Then c_i⁺ = c_i − c + (x − y) / (K η). Return y and c_i⁺ − c_i.
        """
        self.model.load_state_dict(weights)
        parameters = dict(self.model.named_parameters())
        steps = 0
        for batch in self.batches(number):
            loss = self.cross_entropy(batch)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            with torch.no_grad():
                for (name, p), g in zip(parameters.items(), gradients, strict=True):
                    corrected = g - self.own[name] + common[name]
                    p.sub_(self.lr * corrected)
            steps += 1

        y = plain.copied(self.model)
        change = {}
        for name, c in common.items():
            change[name] = (weights[name] - y[name]) / (steps * self.lr) - c
            self.own[name] = self.own[name] + change[name]
        return y, change


@pytest.mark.parametrize(("arch", "server_lr"), [("htcnn-3", 0.7), ("resnet4-imagenet-stem", 1.5)])
def test_three_rounds_equal_an_independent_script(arch, server_lr, tmp_path):
    """Clients weigh alike though they have different numbers of samples.

    The server's learning rate moves the weights; buffers become the clients' mean.
    """
    more = {"rounds": 3, "momentum": 0.0, "scaffold__server_lr": server_lr, **plain.UNEQUAL}
    outcome, clients = plain.side_by_side(tmp_path, SCAFFOLDClient, arch, algo="scaffold", **more)
    assert len({len(client.y) for client in clients}) > 1

    first = clients[0].model
    weights = plain.copied(first)
    common = {name: torch.zeros_like(p) for name, p in first.named_parameters()}
    for client in clients:
        client.own = dict(common)
    alike = [1] * plain.CLIENTS
    for number in (1, 2, 3):
        sent = [client.train(number, weights, common) for client in clients]

        mean = plain.averaged([model for model, _ in sent], alike)
        change = plain.averaged([change for _, change in sent], alike)
        for name in common:
            moved = mean[name] - weights[name]
            mean[name] = weights[name] + server_lr * moved
            common[name] = common[name] + change[name]
        weights = mean

    left = plain.weights_left(outcome)
    floats = {name: value for name, value in left.items() if value.is_floating_point()}
    plain.assert_close(floats, {name: weights[name] for name in floats})
