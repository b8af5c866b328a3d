"""FedNH, two rounds, sample by sample in float64.

Cosines, the trained scale, class means and the moving prototypes.
"""

import numpy as np
import pytest
import torch

from protofl_common.experiment.settings import Settings
from tests.support import plain
from tests.support.attacks import values_of
from tests.support.declaration import COUNTED, Declared

DECLARED = Declared(COUNTED, weights=True, acts={"smoothing": 0.5, "scale": 5.0})

Means = dict[int, tuple[np.ndarray, int]]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


class FedNHClient(plain.PlainClient):
    """A client whose network is the body, with the scale s as its last parameter."""

    def __init__(self, settings: Settings, *facts: object) -> None:
        super().__init__(settings, *facts)
        self.net = torch.nn.Module()
        self.net.body = self.model_of("global").body
        self.net.register_parameter(
            "scale", torch.nn.Parameter(torch.tensor(settings.hparams.scale))
        )

    def train(self, number: int, weights: plain.State, prototypes: np.ndarray) -> plain.State:
        self.net.load_state_dict(weights)
        self.sgd(number, self.net, lambda batch: self.loss(batch, torch.from_numpy(prototypes)))
        return plain.copied(self.net)

    def loss(self, batch: list[int], prototypes: torch.Tensor) -> torch.Tensor:
        """Return the mean over the batch of −log softmax(s cos(w_c, z)) at the sample's class.

        w_c are the prototypes, z a sample's features.
        """
        logits = []
        for z in self.net.body(self.x[batch]).double():
            cosines = [plain.cosine(w, z) for w in prototypes]
            logits.append(self.net.scale * torch.stack(cosines))
        return plain.cross_entropy(torch.stack(logits), self.labels(batch))

    def means(self) -> Means:
        """Return for each class the mean of its features at unit length, and its number."""
        with torch.no_grad():
            features = [unit(z) for z in self.net.body(self.x).double().numpy()]
        means = {}
        for label, rows in self.rows_of().items():
            means[label] = (sum(features[i] for i in rows) / len(rows), len(rows))
        return means


def moved(prototypes: np.ndarray, sets: list[Means], rho: float, merging: str) -> np.ndarray:
    """Return w_c ← unit(ρ w_c + (1 − ρ) unit(m_c)) for each class c that was sent.

    m_c is the mean of the clients' class means by samples, or their median.
    """
    after = prototypes.copy()
    for label, held in plain.by_class(sets).items():
        means = [unit(mean) for mean, _ in held]
        counts = [count for _, count in held]
        if merging == "median":
            middle = np.median(means, axis=0)
        else:
            middle = np.average(means, axis=0, weights=counts)

        target = unit(middle)
        after[label] = unit(rho * after[label] + (1 - rho) * target)
    return after


@pytest.mark.parametrize(
    ("rho", "scale", "merging"), [(0.9, 1.0, "mean"), (0.3, 4.0, "mean"), (0.5, 2.0, "median")]
)
def test_two_rounds_equal_an_independent_script(rho, scale, merging, tmp_path):
    """Weights, prototypes and the clients' models, whose head is the prototypes, are the script's.

    The first prototypes come from the system; of them the test knows that they are orthogonal.
    """
    settings = {"fednh__smoothing": rho, "fednh__scale": scale, "merging": merging}
    outcome, clients = plain.side_by_side(
        tmp_path, FedNHClient, algo="fednh", **settings, **plain.UNEQUAL
    )
    first_message, _ = outcome.exchanged(number=1)[0]
    prototypes = values_of(first_message.content["prototypes"]["means"]).astype(np.float64)
    np.testing.assert_allclose(prototypes @ prototypes.T, np.eye(10), atol=1e-5)

    weights = plain.copied(clients[0].net)
    for number in (1, 2):
        states = [client.train(number, weights, prototypes) for client in clients]
        prototypes = moved(prototypes, [client.means() for client in clients], rho, merging)
        if merging == "mean":
            weights = plain.mean_by_samples(clients, states)
        else:
            for name in weights:
                of_clients = torch.stack([state[name] for state in states])
                weights[name] = of_clients.median(0).values

    left = {}
    for name, value in plain.weights_left(outcome).items():
        left[name.replace("head.scale", "scale")] = value
    plain.assert_close(left, weights)
    plain.assert_prototypes_left(outcome, dict(enumerate(prototypes)))

    # a client keeps a plain linear head: its rows are the prototypes, and no scale is left
    del weights["scale"]
    weights["head.weight"] = torch.from_numpy(prototypes).float()
    weights["head.bias"] = torch.zeros(10)
    plain.assert_models_left(outcome, clients, weights)
    for accuracy in outcome.summary["accuracy-of-clients"].values():
        assert accuracy["head"] == accuracy["prototype"]
