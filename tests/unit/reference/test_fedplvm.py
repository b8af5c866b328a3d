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
        self.sgd(
            number,
            loss=lambda batch: self.cross_entropy_and(batch, partial(self.prototype_loss, protos)),
        )
        return dict(self.model.state_dict())

    def prototype_loss(self, protos: Set, z: torch.Tensor, label: int) -> torch.Tensor | float:
        """λ times Eq. 5, 6 and 8."""
        s = [similarity(z, g, self.hparams.alpha, self.hparams.similarity_floor) for _, g in protos]
        own = [value for value, (of, _) in zip(s, protos, strict=True) if of == label]
        if not own:
            return 0.0
        tau = self.hparams.temperature
        share = sum(torch.exp(v / tau) for v in own) / sum(torch.exp(v / tau) for v in s)
        return self.hparams.lambda_ * (-torch.log(share) + torch.abs(sum(own) - len(own)))

    def prototypes(self) -> Set:
        """Eq. 3."""
        with torch.no_grad():
            z = self.model.body(self.x).numpy()
        return clusters([(label, z[i]) for i, label in enumerate(self.y)])


def clusters(rows: Set) -> Set:
    """The cluster means of each class's rows, by FINCH's coarsest partition."""
    found = []
    for label in sorted({label for label, _ in rows}):
        of_class = np.stack([row for one, row in rows if one == label]).astype(np.float64)
        partition = FINCH(of_class, verbose=False)[0][:, -1] if len(of_class) > 1 else np.zeros(1)
        for number in range(int(partition.max()) + 1):
            found.append((label, of_class[partition == number].mean(0).astype(np.float32)))
    return found


@pytest.mark.parametrize(("lambda_", "floor"), [(1.0, 1e-6), (5.0, 0.1)])
def test_two_rounds_equal_an_independent_script(
    lambda_: float, floor: float, tmp_path: Path
) -> None:
    more = {"feature_dim": 16, "lr": 0.01, "train_samples": 40, "fedplvm__lambda": lambda_}
    more |= {"fedplvm__similarity_floor": floor}
    outcome, clients = side_by_side(tmp_path, FedPLVMClient, algo="fedplvm", **more)
    weights, protos = dict(clients[0].model_of("global").state_dict()), Set()
    sizes = [len(client.y) for client in clients]
    for number in (1, 2):
        weights = averaged([client.train(number, weights, protos) for client in clients], sizes)
        local = [pair for client in clients for pair in client.prototypes()]
        protos = clusters(local)

    torch.testing.assert_close(weights_left(outcome), weights, rtol=1e-3, atol=1e-5)

    kept = load_file(outcome.folder / "prototypes.safetensors")
    assert kept["labels"].tolist() == [label for label, _ in protos]
    assert len(protos) < len(local)
    for mean, (_, expected) in zip(kept["means"].numpy(), protos, strict=True):
        np.testing.assert_allclose(mean, expected, rtol=1e-3, atol=1e-4)

    server = [row["server"] for row in outcome.rows if "server" in row]
    assert server[-1] == {"local-prototypes": len(local), "global-prototypes": len(protos)}

    classes = outcome.rows[1]["clients"]["site-0"]["prototypes-of-classes"]
    assert (
        classes
        == np.bincount([label for label, _ in clients[0].prototypes()], minlength=10).tolist()
    )
