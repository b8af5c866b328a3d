"""FedTGP, Table 5: what a round costs on the wire in Cifar100's practical setting, measured on a real run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message

from protofl_common.config.sections import DataSettings
from protofl_common.data import sources
from protofl_common.data.raw import RawData
from tests.support.given import Patch
from tests.support.harness import run_config, run_federation

CIFAR100, PER_CLASS, OFFICIAL_TEST = 100, 600, 100
CLIENTS, DIM = 20, 512
SIDE = 8


def labels_like_cifar100(_: DataSettings) -> RawData:
    """100 classes of 500 training and 100 test images, black, 8×8."""
    labels = np.repeat(np.arange(CIFAR100), PER_CLASS)
    official = np.tile(np.arange(PER_CLASS) >= PER_CLASS - OFFICIAL_TEST, CIFAR100).astype(np.uint8)
    images = np.zeros((len(labels), 3, SIDE, SIDE), np.uint8)
    return RawData(
        images,
        labels,
        np.zeros_like(labels),
        official,
        tuple(str(label) for label in range(CIFAR100)),
    )


def prototypes_in(message: Message) -> int:
    return len(message.content.array_records["prototypes"]["labels"].data) // 8


@pytest.mark.parametrize(
    ("algo", "beside"), [pytest.param("fedproto", 2, marks=pytest.mark.long), ("fedtgp", 1)]
)
def test_cifar100_costs_what_the_paper_says(
    tmp_path: Path, monkeypatch: Patch, algo: str, beside: int
) -> None:
    """Σ_i D (C_i + C) floating-point numbers, and beside each prototype its label (FedProto: and count, going up).

    The paper's 1.48 M are of its own division into Dir(0.1) shares; C_i, the classes of a client, differ with it.
    """
    settings = {
        "models": "htcnn-1",
        "feature_dim": DIM,
        "batch_size": 4096,
        "train_samples": 0,
        "train_fraction": 0.75,
    }
    config = run_config(tmp_path, algo=algo, seed=1, dataset="cifar100", partition="dirichlet", alpha=0.1,
        cache_dir=str(tmp_path / "cache"), evaluate_every=2, fedtgp__server_epochs=1, **settings)  # fmt: skip
    row = replace(sources.SOURCES["cifar100"], read=labels_like_cifar100, locate=lambda _: ())
    monkeypatch.setitem(sources.SOURCES, "cifar100", row)
    run = run_federation(config, CLIENTS)
    training = run.exchanged(number=2)
    assert {prototypes_in(message) for message, _ in training} == {CIFAR100}
    held, received = sum(prototypes_in(reply) for _, reply in training), CLIENTS * CIFAR100
    labels_and_counts = beside * held + received
    numbers = (sum(run.rows[1]["bytes"].values()) - 8 * labels_and_counts) // 4
    assert numbers == DIM * (held + received)
    assert numbers + labels_and_counts == pytest.approx(1.48e6, rel=0.05)
