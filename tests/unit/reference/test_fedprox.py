"""FedProx, two rounds: the gradient of the proximal term by hand, the mean of the models by samples."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protofl_common.experiment.settings import Settings
from tests.support.harness import run_config, run_federation
from tests.support.plain import CLIENTS, PlainClient, State, assert_close, averaged, copied, cross_entropy


class FedProxClient(PlainClient):
    def train(self, number: int, weights: State) -> State:
        """∇h = ∇F + μ (w − w^t)."""
        model = self.model_of("global")
        model.load_state_dict(weights)
        start = [p.detach().clone() for p in model.parameters()]
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        self.proximal = []
        for batch in self.batches(number):
            loss = cross_entropy(model(self.x[batch]), [self.y[i] for i in batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                apart = [p - w for p, w in zip(model.parameters(), start, strict=True)]
                norm = sum(float((d.double() ** 2).sum()) for d in apart)
                self.proximal += len(batch) * [self.hparams.mu / 2 * norm]
                for p, g, d, v in zip(model.parameters(), gradients, apart, velocity, strict=True):
                    v.mul_(self.momentum).add_(g + self.hparams.mu * d)
                    p.sub_(self.lr * v)
        return copied(model)


@pytest.mark.parametrize("mu", [0.1, 5.0])
def test_two_rounds_equal_an_independent_script(mu: float, tmp_path: Path) -> None:
    config = run_config(tmp_path, algo="fedprox", models="htcnn-3", fedprox__mu=mu, momentum=0.5, feature_dim=16)
    config |= {"partition": "label-shift", "alpha": 0.5, "local-epochs": 1, "test-samples": 20}
    outcome = run_federation(config, clients=CLIENTS)

    clients = [FedProxClient(Settings.from_run_config(config), index, "htcnn-3") for index in range(CLIENTS)]
    weights = copied(clients[0].model_of("global"))
    for number in (1, 2):
        weights = averaged([client.train(number, weights) for client in clients], [len(one.y) for one in clients])
    assert_close(load_file(outcome.folder / "weights.safetensors"), weights)
    for client in clients:
        told = outcome.rows[1]["clients"][client.name]["losses"]["proximal"]
        assert told == pytest.approx(sum(client.proximal) / len(client.proximal), rel=1e-3)
        assert told > 0
