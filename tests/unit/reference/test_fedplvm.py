"""FedPLVM, two rounds: clusters, loss, averages and global clusters again from the equations."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import plain
from tests.support.declaration import PLAIN, Declared
from tests.support.plain_finch import coarsest_clusters

DECLARED = Declared(
    PLAIN, weights=True, several=True, losses=("cross-entropy", "contrast", "correction")
)

Set = list[tuple[int, np.ndarray]]
"""(class, prototype), one after another."""


class FedPLVMClient(plain.PlainClient):
    def train(self, number: int, weights: plain.State, protos: Set) -> plain.State:
        self.model.load_state_dict(weights)
        term = partial(self.prototype_loss, protos)
        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, term))
        return plain.copied(self.model)

    def prototype_loss(self, protos: Set, z: torch.Tensor, label: int) -> torch.Tensor | float:
        """Return λ times the contrast and the correction of one sample, Eq. 5, 6 and 8."""
        hparams = self.hparams
        every = []
        own = []
        for of_class, g in protos:
            cosine = plain.cosine(z, torch.from_numpy(g))
            s = cosine.clamp(min=hparams.similarity_floor) ** hparams.alpha  # Eq. 7
            every.append(s)
            if of_class == label:
                own.append(s)
        if not own:
            return 0.0

        of_own = torch.exp(torch.stack(own) / hparams.temperature).sum()
        of_every = torch.exp(torch.stack(every) / hparams.temperature).sum()
        contrast = -torch.log(of_own / of_every)
        correction = torch.abs(sum(own) - len(own))
        return hparams.lambda_ * (contrast + correction)

    def prototypes(self) -> Set:
        """Return the clusters' means of the client's features, by class (Eq. 3)."""
        with torch.no_grad():
            z = self.model.body(self.x).numpy()
        return clusters(list(zip(self.y, z, strict=True)))


def clusters(rows: Set) -> Set:
    """Return the cluster means of each class's rows, by FINCH's coarsest partition."""
    found = []
    of_classes = plain.by_class({label: row} for label, row in rows)
    for label, of_class in of_classes.items():
        for mean in coarsest_clusters(np.stack(of_class).astype(np.float64)):
            found.append((label, mean.astype(np.float32)))
    return found


@pytest.mark.parametrize(("lambda_", "floor"), [(1.0, 1e-6), (5.0, 0.1)])
def test_two_rounds_equal_an_independent_script(lambda_, floor, tmp_path):
    """Weights, global prototypes, and how many prototypes are reported, are the script's."""
    settings = {
        "lr": 0.01,
        "train_samples": 40,
        "fedplvm__lambda": lambda_,
        "fedplvm__similarity_floor": floor,
    }
    outcome, clients = plain.side_by_side(tmp_path, FedPLVMClient, algo="fedplvm", **settings)

    weights = plain.copied(clients[0].model)
    protos = []
    for number in (1, 2):
        states = [client.train(number, weights, protos) for client in clients]
        weights = plain.mean_by_samples(clients, states)
        local = []
        for client in clients:
            local += client.prototypes()
        protos = clusters(local)

    torch.testing.assert_close(plain.weights_left(outcome), weights, rtol=1e-3, atol=1e-5)

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
