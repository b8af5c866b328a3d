"""FedPCL's clients, written again from the equations."""

import numpy as np
import torch
from torch import Tensor, nn

from protofl_common.backbones.features import extract_features
from protofl_common.basics.seeding import derive_seed
from protofl_common.config.backbones import EMBEDDED
from protofl_common.experiment.settings import Settings
from protofl_common.models.build import build_model
from tests.support.plain import PlainClient

Table = dict[int, np.ndarray]
"""Class -> its prototype C, float64 [D]."""


class FedPCLClient(PlainClient):
    """A projection z of frozen representations r, trained by contrast with prototypes."""

    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__(settings, index, "projection")
        cpu = torch.device("cpu")
        self.r = extract_features(self.data.train_inputs, tuple(EMBEDDED), cpu)
        self.r_test = extract_features(self.data.test_inputs, tuple(EMBEDDED), cpu)
        self.model = self.model_of(self.name)

    def model_of(self, owner: str) -> nn.Module:
        return build_model(
            "projection",
            input_shape=(self.r.shape[1],),
            num_classes=10,
            feature_dim=self.dim,
            seed=derive_seed(self.seed, "model", owner),
        )

    def train(self, number: int, overall: Table, sets: list[Table]) -> None:
        """Train for a round: Eq. 8 to 10.

        The first term contrasts with the global prototypes, ``overall``, which are empty in the
        first round; the second is the mean over the ``sets`` of prototypes of all clients.
        """
        body = self.model.train().body
        velocity = [torch.zeros_like(p) for p in body.parameters()]
        for batch in self.batches(number):
            z = body(self.r[batch])
            if not overall:
                continue  # the first round only shows batch normalisation the data
            losses = []
            for row, i in enumerate(batch):
                unit = z[row] / z[row].norm()
                global_term = self.contrast(unit, self.y[i], overall)
                local_terms = sum(self.contrast(unit, self.y[i], table) for table in sets)
                losses.append(global_term + local_terms / max(1, len(sets)))
            self.step(sum(losses) / len(losses), body, velocity)

    def contrast(self, z: Tensor, label: int, table: Table) -> Tensor:
        """−log [ exp(z·C^y/τ) / Σ_{a ≠ y} exp(z·C^a/τ) ], where y is the label.

        z and the prototypes C are unit vectors; τ is the temperature.
        """
        similarities = {}
        for c, prototype in table.items():
            unit = prototype / np.linalg.norm(prototype)
            product = z @ torch.from_numpy(unit).float()
            similarities[c] = torch.exp(product / self.hparams.temperature)
        others = sum(value for c, value in similarities.items() if c != label)
        return -torch.log(similarities[label] / others)

    def projected(self, r: Tensor) -> np.ndarray:
        """Return the projections z of representations r, float64 [N, D].

        The mode of the model (training or evaluation) is left as it is.
        """
        with torch.no_grad():
            return self.model.body(r).double().numpy()

    def prototypes(self) -> Table:
        """Return class -> the mean of its samples' projections, as unit vectors (Eq. 5)."""
        self.model.eval()
        z = self.projected(self.r)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        return {label: z[rows].mean(0) for label, rows in self.rows_of().items()}

    def nearest(self) -> float:
        """Return the share of test samples whose nearest own prototype by cosine is of their class.

        `prototypes` puts the model into evaluation mode.
        """
        own = self.prototypes()
        hits = 0
        for z, label in zip(self.projected(self.r_test), self.y_test, strict=True):
            hits += label == max(own, key=lambda c: z @ own[c] / np.linalg.norm(own[c]))
        return hits / len(self.y_test)
