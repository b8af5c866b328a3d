"""FedTGP, Table 5: what a round costs on the wire, measured on a real run.

The division is Cifar100's practical setting.
"""

from dataclasses import replace

import numpy as np
import pytest

from protofl_common.data import sources
from protofl_common.data.raw import RawData
from tests.support.harness import run_config, run_federation

CIFAR100 = 100  # classes
PER_CLASS = 600  # images
OFFICIAL_TEST = 100  # of these
CLIENTS = 20
DIM = 512
SIDE = 8
INTEGER_BYTES = 8
FLOAT_BYTES = 4


def labels_like_cifar100(_):
    """Return black images of 8×8 with CIFAR-100's labels: 500 training and 100 test images each."""
    labels = np.repeat(np.arange(CIFAR100), PER_CLASS)
    official = np.tile(np.arange(PER_CLASS) >= PER_CLASS - OFFICIAL_TEST, CIFAR100).astype(np.uint8)
    images = np.zeros((len(labels), 3, SIDE, SIDE), np.uint8)
    classes = tuple(str(label) for label in range(CIFAR100))
    return RawData(images, labels, np.zeros_like(labels), official, classes)


def prototypes_in(message):
    """Return how many prototypes a message has: each has a label, which is an integer."""
    return len(message.content.array_records["prototypes"]["labels"].data) // INTEGER_BYTES


@pytest.mark.parametrize(
    ("algo", "integers_up"), [pytest.param("fedproto", 2, marks=pytest.mark.long), ("fedtgp", 1)]
)
def test_cifar100_costs_what_the_paper_says(tmp_path, monkeypatch, algo, integers_up):
    """Table 5: Σ_i D (C_i + C) floating-point numbers in a round, 1.48 million in all.

    Client i sends prototypes of its C_i classes, in D numbers each, and gets those of all C = 100.
    Beside each prototype go integers of 8 bytes: its label, and upwards also FedProto's count. The
    paper's number is of its own division into Dir(0.1) shares, so C_i differ a little.
    """
    source = replace(sources.SOURCES["cifar100"], read=labels_like_cifar100, locate=lambda _: ())
    monkeypatch.setitem(sources.SOURCES, "cifar100", source)
    config = run_config(
        tmp_path,
        algo=algo,
        seed=1,
        dataset="cifar100",
        partition="dirichlet",
        alpha=0.1,
        train_samples=0,
        train_fraction=0.75,
        models="htcnn-1",
        feature_dim=DIM,
        batch_size=4096,
        evaluate_every=2,
        fedtgp__server_epochs=1,
        cache_dir=str(tmp_path / "cache"),
    )
    run = run_federation(config, clients=CLIENTS)

    sent = 0
    received = 0
    for message, reply in run.exchanged(number=2):
        assert prototypes_in(message) == CIFAR100
        received += CIFAR100
        sent += prototypes_in(reply)

    assert received == CLIENTS * CIFAR100

    integers = integers_up * sent + received
    bytes_exchanged = sum(run.rows[1]["bytes"].values())  # round 2, up and down
    floats = (bytes_exchanged - INTEGER_BYTES * integers) // FLOAT_BYTES

    assert floats == DIM * (sent + received)
    assert floats + integers == pytest.approx(1.48e6, rel=0.05)
