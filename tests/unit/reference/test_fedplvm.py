"""FedPLVM, two rounds: clusters, loss, averages and global clusters again from the equations."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from finch import FINCH
from safetensors.torch import load_file

from tests.support.declaration import PLAIN, Declared
from tests.support.plain import PlainClient, averaged, side_by_side, weights_left

DECLARED = Declared(
    PLAIN, weights=True, several=True, losses=("cross-entropy", "contrast", "correction")
)

Set = list[tuple[int, np.ndarray]]
"""(class, prototype), one after another."""


def similarity(z: torch.Tensor, g: np.ndarray, alpha: float, floor: float) -> torch.Tensor:
    """Eq. 7, one sample and one prototype."""
    p = torch.from_numpy(g)
    cosine = (z * p).sum() / (z.norm().clamp(min=1e-12) * p.norm())
    return torch.clamp(cosine, min=floor) ** alpha


class FedPLVMClient(PlainClient):
    def train(
        self, number: int, weights: dict[str, torch.Tensor], protos: Set
    ) -> dict[str, torch.Tensor]:
        self.model = self.model_of("global")
        self.model.load_state_dict(weights)
        term = partial(self.prototype_loss, protos)
        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, term))
        return dict(self.model.state_dict())

    def prototype_loss(self, protos: Set, z: torch.Tensor, label: int) -> torch.Tensor | float:
        """λ times the contrast and the correction of one sample, Eq. 5, 6 and 8."""
        hparams = self.hparams
        every = []
        own = []
        for of_class, g in protos:
            s = similarity(z, g, hparams.alpha, hparams.similarity_floor)
            every.append(s)
            if of_class == label:
                own.append(s)
        if not own:
            return 0.0

        of_own = sum(torch.exp(s / hparams.temperature) for s in own)
        of_every = sum(torch.exp(s / hparams.temperature) for s in every)
        contrast = -torch.log(of_own / of_every)
        correction = torch.abs(sum(own) - len(own))
        return hparams.lambda_ * (contrast + correction)

    def prototypes(self) -> Set:
        """Eq. 3."""
        with torch.no_grad():
            z = self.model.body(self.x).numpy()
        return clusters(list(zip(self.y, z, strict=True)))


def clusters(rows: Set) -> Set:
    """The cluster means of each class's rows, by FINCH's coarsest partition."""
    found = []
    for label in sorted({label for label, _ in rows}):
        of_class = np.stack([row for one, row in rows if one == label]).astype(np.float64)
        cluster_of_row = np.zeros(1)
        if len(of_class) > 1:
            partitions, *_ = FINCH(of_class, verbose=False)
            cluster_of_row = partitions[:, -1]

        for number in range(int(cluster_of_row.max()) + 1):
            mean = of_class[cluster_of_row == number].mean(0)
            found.append((label, mean.astype(np.float32)))
    return found


@pytest.mark.parametrize(("lambda_", "floor"), [(1.0, 1e-6), (5.0, 0.1)])
def test_two_rounds_equal_an_independent_script(
    lambda_: float, floor: float, tmp_path: Path
) -> None:
    """Weights, global prototypes, and how many prototypes are reported, are the script's."""
    settings = {
        "feature_dim": 16,
        "lr": 0.01,
        "train_samples": 40,
        "fedplvm__lambda": lambda_,
        "fedplvm__similarity_floor": floor,
    }
    outcome, clients = side_by_side(tmp_path, FedPLVMClient, algo="fedplvm", **settings)

    weights = dict(clients[0].model_of("global").state_dict())
    protos: Set = []
    sizes = [len(client.y) for client in clients]
    for number in (1, 2):
        weights = averaged([client.train(number, weights, protos) for client in clients], sizes)
        local = [pair for client in clients for pair in client.prototypes()]
        protos = clusters(local)

    torch.testing.assert_close(weights_left(outcome), weights, rtol=1e-3, atol=1e-5)

    kept = load_file(outcome.folder / "prototypes.safetensors")
    assert kept["labels"].tolist() == [label for label, _ in protos]
    assert len(protos) < len(local)  # the server has clustered several into one
    for mean, (_, expected) in zip(kept["means"].numpy(), protos, strict=True):
        np.testing.assert_allclose(mean, expected, rtol=1e-3, atol=1e-4)

    server = [row["server"] for row in outcome.rows if "server" in row]
    assert server[-1] == {"local-prototypes": len(local), "global-prototypes": len(protos)}

    of_classes = outcome.rows[1]["clients"]["site-0"]["prototypes-of-classes"]
    labels = [label for label, _ in clients[0].prototypes()]
    assert of_classes == np.bincount(labels, minlength=10).tolist()
