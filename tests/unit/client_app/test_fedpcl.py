"""FedPCL's ablations of the loss (Table 5) on a client's batch, against NumPy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from client_app.algorithms.fedpcl import FedPCL
from client_app.training import Batch
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from tests.support.harness import client_of, run_config

HELD = 7
"""The server has prototypes of classes 0 … 6."""


def client(tmp_path: Path, loss: str) -> FedPCL:
    config = run_config(tmp_path, algo="fedpcl", backbones="glyphs", feature_dim=6, fedpcl__loss=loss)
    found = FedPCL(client_of(config, 1, 5), 2)
    means = torch.rand(HELD, 6, generator=torch.Generator().manual_seed(0))
    found.receive(Payload(prototypes=Prototypes(means, torch.arange(HELD))))
    return found


def batch(z: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> Batch:
    """Without the inputs, at which no loss of FedPCL looks."""
    return Batch(torch.empty(len(labels), 0), labels, torch.arange(len(labels)), z, logits)


def unit(rows: torch.Tensor) -> np.ndarray:
    array = rows.detach().double().numpy()
    return array / np.linalg.norm(array, axis=1, keepdims=True)


@pytest.mark.parametrize("loss", ["ce", "ce-protodist"])
def test_cross_entropy_and_the_distance_to_the_global_prototype(loss: str, tmp_path: Path) -> None:
    """A sample of a class without a prototype counts in the batch's mean, and is pulled nowhere."""
    found = client(tmp_path, loss)
    generator = torch.Generator().manual_seed(1)
    z, logits = torch.randn(10, 6, generator=generator), torch.randn(10, 10, generator=generator)
    terms = found.loss(batch(z, logits, torch.arange(10)))
    expected = {"cross-entropy": -logits.double().log_softmax(1).numpy()[np.arange(10), np.arange(10)].mean()}
    if loss == "ce-protodist":
        expected["prototype"] = ((unit(z)[:HELD] - unit(found.global_prototypes.means)) ** 2).sum() / 10
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(expected, rel=1e-5)


def test_supervised_contrast_knows_no_prototypes(tmp_path: Path) -> None:
    found = client(tmp_path, "supcon")
    z, labels = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) // 2
    terms = found.loss(batch(z, torch.zeros(8, 10), labels))
    found.receive(Payload())
    assert found.loss(batch(z, torch.zeros(8, 10), labels)) == terms
    assert list(terms) == ["contrast"]
