"""SCAFFOLD, three rounds: Eq. 3 to 5 by hand, the client's variate by option II."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from protofl_common.experiment.settings import Settings
from tests.support.harness import run_config, run_federation
from tests.support.plain import CLIENTS, PlainClient, State, assert_close, averaged, copied, cross_entropy

SERVER_LR = 0.7
Variate = list[torch.Tensor]


class SCAFFOLDClient(PlainClient):
    own: Variate

    def train(self, number: int, weights: State, common: Variate) -> tuple[State, Variate]:
        """y ← y − η (∇F − c_i + c); c_i⁺ = c_i − c + (x − y) / (K η)."""
        model = self.model_of("global")
        model.load_state_dict(weights)
        start, steps = [p.detach().clone() for p in model.parameters()], 0
        for batch in self.batches(number):
            loss = cross_entropy(model(self.x[batch]), [self.y[i] for i in batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g, own, c in zip(model.parameters(), gradients, self.own, common, strict=True):
                    p.sub_(self.lr * (g - own + c))
            steps += 1
        moved = [x - y.detach() for x, y in zip(start, model.parameters(), strict=True)]
        renewed = [own - c + d / (steps * self.lr) for own, c, d in zip(self.own, common, moved, strict=True)]
        change = [new - old for new, old in zip(renewed, self.own, strict=True)]
        self.own = renewed
        return copied(model), change


def test_three_rounds_equal_an_independent_script(tmp_path: Path) -> None:
    config = run_config(tmp_path, algo="scaffold", models="htcnn-3", rounds=3, momentum=0.0, feature_dim=16)
    config |= {"partition": "label-shift", "alpha": 0.5, "local-epochs": 1, "test-samples": 20}
    config |= {"scaffold.server-lr": SERVER_LR}
    outcome = run_federation(config, clients=CLIENTS)

    clients = [SCAFFOLDClient(Settings.from_run_config(config), index, "htcnn-3") for index in range(CLIENTS)]
    weights = copied(clients[0].model_of("global"))
    common = [torch.zeros_like(p) for p in clients[0].model_of("global").parameters()]
    for client in clients:
        client.own = [torch.zeros_like(c) for c in common]
    for number in (1, 2, 3):
        sent = [client.train(number, weights, common) for client in clients]
        mean = averaged([model for model, _ in sent], [1] * CLIENTS)
        weights = {name: value + SERVER_LR * (mean[name] - value) for name, value in weights.items()}
        changes = zip(*(change for _, change in sent), strict=True)
        common = [c + sum(of_all) / CLIENTS for c, of_all in zip(common, changes, strict=True)]
    assert_close(load_file(outcome.folder / "weights.safetensors"), weights)
