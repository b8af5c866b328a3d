"""How much crosses the wire in Cifar100's practical setting (FedTGP, Table 5), measured on a real run."""

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
from flwr.app import Message, MessageType

from protofl_common.config.sections import DataSettings
from protofl_common.data import sources
from protofl_common.data.raw import RawData
from tests.support.harness import run_config, run_federation

CIFAR100, PER_CLASS, OFFICIAL_TEST = 100, 600, 100
CLIENTS, DIM = 20, 512
SIDE = 8


@dataclass(frozen=True)
class Numbers:
    """Of a round, all clients together."""

    on_the_wire: int
    """Floating-point numbers, labels and counts, down and up."""
    held: int
    """Σ C_i: prototypes that were sent up."""
    classes_down: int
    """C̄: prototypes that were sent down to each client."""


def labels_like_cifar100(_: DataSettings) -> RawData:
    """100 classes of 500 training and 100 test images, black, 8×8."""
    labels = np.repeat(np.arange(CIFAR100), PER_CLASS)
    official = np.tile(np.arange(PER_CLASS) >= PER_CLASS - OFFICIAL_TEST, CIFAR100).astype(np.uint8)
    images = np.zeros((len(labels), 3, SIDE, SIDE), np.uint8)
    return RawData(images, labels, np.zeros_like(labels), official, tuple(str(label) for label in range(CIFAR100)))


def numbers_per_round(folder: Path, algo: str, seed: int) -> Numbers:
    """The second round, the first in which the server has something to send."""
    settings = {"models": "htcnn-1", "feature_dim": DIM, "batch_size": 4096, "train_samples": 0, "train_fraction": 0.75}
    config = run_config(folder, algo=algo, seed=seed, dataset="cifar100", partition="dirichlet", alpha=0.1,
        cache_dir=str(folder / "cache"), evaluate_every=2, fedtgp__server_epochs=1, **settings)  # fmt: skip
    row = replace(sources.SOURCES["cifar100"], read=labels_like_cifar100, locate=None)
    with mock.patch.dict(sources.SOURCES, {"cifar100": row}):
        run = run_federation(config, CLIENTS)
    traffic = run.rows[1]["bytes"]
    (down,) = {_prototypes(message) for message, _ in run.grid.log if _of_round_two(message)}
    held = sum(_prototypes(reply) for message, reply in run.grid.log if _of_round_two(message))
    labels = 8 * (held + CLIENTS * down)
    counts = 8 * held if algo == "fedproto" else 0
    numbers = (traffic["up"] + traffic["down"] - labels - counts) // 4
    return Numbers(numbers + (labels + counts) // 8, held, down)


def _of_round_two(message: Message) -> bool:
    return message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == "2"


def _prototypes(message: Message) -> int:
    return len(message.content.array_records["prototypes"]["labels"].data) // 8
