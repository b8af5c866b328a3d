"""FedPCL's clients, written again from the equations."""

import numpy as np
import torch

from protofl_common.backbones.features import extract_features
from protofl_common.basics.seeding import derive_seed
from protofl_common.config.backbones import EMBEDDED
from protofl_common.experiment.settings import Settings
from protofl_common.models.build import build_model
from tests.support.plain import PlainClient

Table = dict[int, np.ndarray]


class FedPCLClient(PlainClient):
    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__(settings, index, "projection")
        cpu = torch.device("cpu")
        both = (self.data.train_inputs, self.data.test_inputs)
        self.r, self.r_test = (extract_features(images, tuple(EMBEDDED), cpu) for images in both)
        self.model = self.model_of(self.name)

    def model_of(self, owner: str) -> torch.nn.Module:
        return build_model("projection", input_shape=(self.r.shape[1],), num_classes=10, feature_dim=self.dim,
            seed=derive_seed(self.seed, "model", owner))  # fmt: skip

    def train(self, number: int, overall: Table, sets: list[Table]) -> None:
        """Eq. 8 to 10."""
        self.model.train()
        velocity = [torch.zeros_like(p) for p in self.model.body.parameters()]
        for batch in self.batches(number):
            z = self.model.body(self.r[batch])
            if not overall:
                continue  # no prototypes yet: the first round only shows batch normalisation the data
            losses = []
            for row, i in enumerate(batch):
                unit = z[row] / z[row].norm()
                terms = [self.contrast(unit, self.y[i], overall)]
                terms.append(
                    sum(self.contrast(unit, self.y[i], one) for one in sets) / max(1, len(sets))
                )
                losses.append(sum(terms))
            self.step(sum(losses) / len(losses), self.model.body, velocity)

    def contrast(self, z: torch.Tensor, label: int, table: Table) -> torch.Tensor:
        """−log [ exp(z·C^y/τ) / Σ_{a ≠ y} exp(z·C^a/τ) ]."""
        products = {
            c: z @ torch.from_numpy(p / np.linalg.norm(p)).float() for c, p in table.items()
        }
        tau = self.hparams.temperature
        below = sum(torch.exp(value / tau) for c, value in products.items() if c != label)
        return -torch.log(torch.exp(products[label] / tau) / below)

    def prototypes(self) -> Table:
        """Eq. 5, of unit vectors."""
        self.model.eval()
        with torch.no_grad():
            z = self.model.body(self.r).double().numpy()
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        return {label: z[[y == label for y in self.y]].mean(0) for label in sorted(set(self.y))}

    def accuracy(self) -> float:
        own = self.prototypes()
        with torch.no_grad():
            z = self.model.body(self.r_test).double().numpy()
        hits = 0
        for row, label in zip(z, self.y_test, strict=True):
            hits += label == max(own, key=lambda c: row @ own[c] / np.linalg.norm(own[c]))
        return hits / len(self.y_test)
