"""FedAvg and FedProto + averaging, two rounds, with batch normalisation.

All that is in a state dict is averaged.
"""

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(weights=True)

ARCH = "resnet4-imagenet-stem"
Table = dict[int, torch.Tensor]


class Client(plain.PlainClient):
    def train(
        self, number: int, weights: plain.State, prototypes: Table, lambda_: float
    ) -> plain.State:
        """CE + λ/B Σ_i mean_d (z_id − C̄^(y_i)_d)², over the samples whose class has a prototype."""

        def pull(z: torch.Tensor, label: int) -> torch.Tensor | float:
            if label not in prototypes:
                return 0.0
            return lambda_ * ((z - prototypes[label]) ** 2).mean()

        self.model.load_state_dict(weights)
        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, pull))
        return plain.copied(self.model)

    def means(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Return for each class its mean feature in evaluation mode, and its number of samples."""
        return {c: (mean.float(), self.y.count(c)) for c, mean in self.class_means().items()}


@pytest.mark.parametrize(("algo", "lambda_"), [("fedavg", 0.0), ("fedproto-avg", 2.0)])
def test_two_rounds_equal_an_independent_script(algo, lambda_, tmp_path):
    """The weights, with all that batch normalisation counts, and FedProto's prototypes."""
    settings = plain.UNEQUAL | {"total_samples": 100, "fedproto_avg__lambda": lambda_}
    outcome, clients = plain.side_by_side(tmp_path, Client, ARCH, algo=algo, **settings)
    sizes = {len(client.y) for client in clients}
    assert len(sizes) > 1
    assert all(n % 10 != 1 for n in sizes)  # a batch of one would have no batch normalisation

    weights = plain.copied(clients[0].model)
    prototypes = {}
    for number in (1, 2):
        states = []
        for client in clients:
            state = client.train(number, weights, prototypes, lambda_)
            states.append({name: value.double() for name, value in state.items()})

        for name, mean in plain.mean_by_samples(clients, states).items():
            # a mean of counters is rounded to a whole number
            weights[name] = mean.round().long() if "num_batches" in name else mean.float()
        if lambda_:
            prototypes = plain.class_averages(client.means() for client in clients)

    assert any("running" in name for name in weights)
    plain.assert_weights_left(outcome, weights)
    if lambda_:
        plain.assert_prototypes_left(outcome, prototypes)
