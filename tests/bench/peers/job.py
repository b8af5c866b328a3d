"""The job that every engine does, and how it reports.

It is imported in each engine's own environment: torch and numpy only. The job is FedAvg,
unweighted, of a small CNN over many users with as many images each; some are asked in each round,
train one epoch with SGD, and all test images are classified by the last global model.
"""

import json
import resource
import sys
import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
FEATURES = 50


@dataclass(frozen=True)
class Job:
    """How many users, images of each, users asked in a round, and rounds.

    The rest is as in pfl-research's benchmark.
    """

    users: int
    images: int
    asked: int
    rounds: int
    batch: int = 10
    lr: float = 0.1


class Data:
    """The job's file; `of` gives a user's inputs float32 [n, 1, 28, 28] and labels int64 [n]."""

    def __init__(self, file: str) -> None:
        with np.load(file) as stored:
            inputs, labels, split, client = (
                stored[key] for key in ("inputs", "labels", "split", "client")
            )
        pixels = torch.from_numpy(inputs).float().div(255)
        self.inputs = (pixels - pixels.mean()) / pixels.std()
        self.labels = torch.from_numpy(labels).long()
        is_train = split == "train"
        self.rows = {}
        for user in np.unique(client).tolist():
            self.rows[user] = torch.from_numpy(np.flatnonzero(is_train & (client == user)))
        self.test_rows = torch.from_numpy(np.flatnonzero(~is_train))

    def of(self, user: int) -> tuple[Tensor, Tensor]:
        rows = self.rows[f"user-{user:05d}"]
        return self.inputs[rows], self.labels[rows]


@cache
def opened(file: str) -> Data:
    return Data(file)


class Network(nn.Module):
    """The network `mnist-cnn`, with what pfl-research asks of a model: a loss, and metrics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv = [
            nn.Conv2d(1, 10, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(10, 20, 5),
            nn.Dropout2d(0.5),
        ]
        flat = [nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(320, FEATURES), nn.ReLU()]
        self.layers = nn.Sequential(*conv, *flat, nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layers(inputs)
        return logits

    def loss(self, inputs: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
        return functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, float]:
        return {}

    def accuracy(self, data: Data) -> float:
        with torch.no_grad():
            predicted = self.eval()(data.inputs[data.test_rows]).argmax(1)
        return float((predicted == data.labels[data.test_rows]).float().mean())


def train(network: Network, inputs: Tensor, labels: Tensor, job: Job) -> None:
    """Train one epoch of plain SGD, as a bare script does it."""
    optimizer = torch.optim.SGD(network.train().parameters(), lr=job.lr)
    for rows in torch.randperm(len(labels)).split(job.batch):
        optimizer.zero_grad()
        network.loss(inputs[rows], labels[rows]).backward()
        optimizer.step()


def arguments() -> tuple[Job, Data, str]:
    """Return what `compare` hands to an engine: the job, the data, a folder for what it writes."""
    torch.set_num_threads(1)
    return Job(**json.loads(sys.argv[1])), opened(sys.argv[2]), sys.argv[3]


class Clock:
    """Notes the time at the end of each round, and reports what `compare` reads."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def tick(self) -> None:
        self.times.append(time.perf_counter())

    def report(self, accuracy: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        seconds = np.diff(self.times).tolist()
        result = {"seconds": seconds, "accuracy": accuracy, "megabytes": peak}
        print("RESULT", json.dumps(result))
