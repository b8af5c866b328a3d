"""FedNH, two rounds, sample by sample in float64.

Cosines, the trained scale, class means and the moving prototypes.
"""

from pathlib import Path

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
    return vector / np.sqrt((vector**2).sum())


class FedNHClient(plain.PlainClient):
    """The body, and s as its last parameter."""

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
        total = torch.zeros((), dtype=torch.float64)
        for z, i in zip(self.net.body(self.x[batch]).double(), batch, strict=True):
            cosines = torch.stack(
                [(w * z).sum() / (w * w).sum().sqrt() / (z * z).sum().sqrt() for w in prototypes]
            )
            logits = self.net.scale * cosines
            total = total - logits[self.y[i]] + torch.log(torch.exp(logits).sum())
        return total / len(batch)

    def means(self) -> Means:
        with torch.no_grad():
            features = [unit(z) for z in self.net.body(self.x).double().numpy()]
        held = {
            label: [z for z, y in zip(features, self.y, strict=True) if y == label]
            for label in set(self.y)
        }
        return {label: (sum(rows) / len(rows), len(rows)) for label, rows in held.items()}


def moved(prototypes: np.ndarray, sets: list[Means], rho: float, merging: str) -> np.ndarray:
    found = prototypes.copy()
    for label in {label for one in sets for label in one}:
        held = [one[label] for one in sets if label in one]
        if merging == "median":
            middle = np.median([unit(mean) for mean, _ in held], axis=0)
        else:
            middle = sum(count * unit(mean) for mean, count in held) / sum(
                count for _, count in held
            )
        found[label] = unit(rho * found[label] + (1 - rho) * unit(middle))
    return found


@pytest.mark.parametrize(
    ("rho", "scale", "merging"), [(0.9, 1.0, "mean"), (0.3, 4.0, "mean"), (0.5, 2.0, "median")]
)
def test_two_rounds_equal_an_independent_script(
    rho: float, scale: float, merging: str, tmp_path: Path
) -> None:
    more = {"feature_dim": 16, "fednh__smoothing": rho, "fednh__scale": scale, "merging": merging}
    outcome, clients = plain.side_by_side(
        tmp_path, FedNHClient, algo="fednh", **more, **plain.UNEQUAL
    )
    sizes = [len(one.y) for one in clients]
    weights = plain.copied(clients[0].net)
    prototypes = values_of(outcome.exchanged(number=1)[0][0].content["prototypes"]["means"]).astype(
        np.float64
    )
    np.testing.assert_allclose(prototypes @ prototypes.T, np.eye(10), atol=1e-5)  # evenly spread
    for number in (1, 2):
        states = [client.train(number, weights, prototypes) for client in clients]
        prototypes = moved(prototypes, [client.means() for client in clients], rho, merging)
        if merging == "mean":
            weights = plain.averaged(states, sizes)
        else:
            weights = {
                name: torch.stack([one[name] for one in states]).median(0).values
                for name in states[0]
            }
    left = plain.weights_left(outcome)
    plain.assert_close(
        {name.replace("head.scale", "scale"): value for name, value in left.items()}, weights
    )
    plain.assert_prototypes_left(outcome, dict(enumerate(prototypes)))
    head = {"head.weight": torch.from_numpy(prototypes).float(), "head.bias": torch.zeros(10)}
    body = {name: value for name, value in weights.items() if name != "scale"}
    plain.assert_models_left(outcome.folder, {client.name: body | head for client in clients})
    assert all(
        one["head"] == one["prototype"] for one in outcome.summary["accuracy-of-clients"].values()
    )
