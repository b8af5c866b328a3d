"""The yardstick: what a round of FedProto or FedTGP costs in bare PyTorch, without any federation.

Two processes of one thread each share the clients, largest first. Models are plain
``nn.Sequential`` of the eight CNNs of HtCNN8, trained by ``torch.optim.SGD``; data lie ready as
float tensors; nothing is stored, sent or checked. Every client's round is: one epoch of
cross-entropy plus FedProto's term, class means after training, evaluation by head and by nearest
prototype, the last two at batch 500. The server averages; FedTGP's trains, by a loop over
minibatches.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from protofl_common.config.architectures import architecture_of
from protofl_common.data import ClientData, open_client_data
from protofl_common.experiment.settings import Settings

LOOP_BATCH = 10
LOOP_LR = 0.01
HIDDEN_LAYERS = {
    "1": (),
    "2": (),
    "3": (512,),
    "4": (512,),
    "5": (1024,),
    "6": (1024,),
    "7": (1024, 512),
    "8": (1024, 512),
}
"""Number of a network of HtCNN8 -> the widths of its linear layers before the features."""


def plain_htcnn(arch: str, dim: int, classes: int) -> tuple[nn.Sequential, nn.Linear]:
    """Return body and head of one of HtCNN8's networks for 1×28×28 images."""
    number = arch.removeprefix("htcnn-")
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    width = 32 * 12 * 12
    if int(number) % 2 == 0:  # networks of even numbers have a second convolution
        layers += [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
        width = 64 * 4 * 4
    layers.append(nn.Flatten())
    for out in (*HIDDEN_LAYERS[number], dim):
        layers += [nn.Linear(width, out), nn.ReLU()]
        width = out
    return nn.Sequential(*layers), nn.Linear(dim, classes)


def normalised(data: ClientData, images: np.ndarray) -> Tensor:
    """Return images of one channel as float tensors, by the data set's mean and deviation."""
    return (torch.from_numpy(images).float() / 255 - data.mean[0]) / data.std[0]


@dataclass
class BareClient:
    """A client's tensors and model, as a worker holds them."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    body: nn.Sequential
    head: nn.Linear

    @classmethod
    def open(cls, settings: Settings, index: int, clients: int) -> BareClient:
        """Open the client's data and build the network that its settings name."""
        data = open_client_data(
            settings.data, seed=settings.run.seed, partition=index, num_partitions=clients
        )
        arch = architecture_of(settings.model.models, index)
        body, head = plain_htcnn(arch, settings.model.feature_dim, len(data.classes))
        return cls(
            x=normalised(data, data.train_inputs),
            y=torch.from_numpy(data.train_labels),
            x_test=normalised(data, data.test_inputs),
            y_test=torch.from_numpy(data.test_labels),
            body=body,
            head=head,
        )

    def round(
        self, table: Tensor | None, held: Tensor | None, lr: float, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Train an epoch, and return the class means [C, D] and counts [C] after it.

        ``table`` has the global prototypes [C, D], and ``held`` [C] is 1 for the classes that have
        one; None before there are any. Evaluation is done for its time: nobody reads the hits.
        """
        optimizer = torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=lr)
        order = torch.randperm(len(self.y))
        for batch in order.split(batch_size):
            z = self.body(self.x[batch])
            loss = F.cross_entropy(self.head(z), self.y[batch])
            if table is not None:
                apart = (z - table[self.y[batch]]).square().mean(1)
                loss = loss + (apart * held[self.y[batch]]).sum() / len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.inference_mode():
            sums = torch.zeros_like(self.head.weight)
            counts = torch.bincount(self.y, minlength=10)
            for x, y in zip(self.x.split(500), self.y.split(500), strict=True):
                sums.index_add_(0, y, self.body(x))
            for x, y in zip(self.x_test.split(500), self.y_test.split(500), strict=True):
                z = self.body(x)
                (self.head(z).argmax(1) == y).sum()
                if table is not None:
                    (torch.cdist(z, table).argmin(1) == y).sum()
        return sums / counts.clamp(min=1)[:, None], counts


def _work(settings: Settings, clients: int, jobs: Queue, done: Queue) -> None:
    """Open all clients, and do their rounds as they come in ``jobs``, until a job is None."""
    torch.set_num_threads(1)
    opened = [BareClient.open(settings, index, clients) for index in range(clients)]
    done.put("ready")
    training = settings.training
    while (job := jobs.get()) is not None:
        index, table, held = job
        means, counts = opened[index].round(table, held, training.lr, training.batch_size)
        done.put((means.numpy(), counts.numpy()))


def averages(means_NCD: Tensor, counts_NC: Tensor) -> Tensor:
    """Merge as FedProto's server does: the mean of each class over the clients' samples, [C, D]."""
    sums_CD = (means_NCD * counts_NC[:, :, None]).sum(0)
    return sums_CD / counts_NC.sum(0).clamp(min=1)[:, None]


def loop(
    start: TrainedPrototypes, samples_PD: Tensor, labels_P: Tensor, margin: float, epochs: int
) -> None:
    """Train FedTGP's server in place, on minibatches of 10 as in the paper.

    Gradients are autograd's, through `torch.cdist`.
    """
    optimizer = torch.optim.SGD([start.vectors_CD, *start.transform.parameters()], lr=LOOP_LR)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels_P)).split(LOOP_BATCH):
            labels = labels_P[rows]
            logits = -torch.cdist(samples_PD[rows], start.transform(start.vectors_CD))
            own_class = F.one_hot(labels, logits.shape[1])
            loss = F.cross_entropy(logits - margin * own_class, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class TrainedPrototypes:
    """FedTGP's server; its margin is the largest distance of a class's mean to its nearest one."""

    def __init__(self, settings: Settings, classes: int) -> None:
        dim = settings.model.feature_dim
        self.hparams = settings.hparams
        self.vectors_CD = nn.Parameter(torch.randn(classes, dim))
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def __call__(self, means_NCD: Tensor, counts_NC: Tensor) -> Tensor:
        """Train the prototypes on the clients' class means, with the margin, and return them."""
        is_sent_NC = counts_NC > 0
        samples_PD = means_NCD[is_sent_NC]
        labels_P = is_sent_NC.nonzero()[:, 1]
        centres = []
        for label in labels_P.unique():
            centres.append(samples_PD[labels_P == label].mean(0))
        centres_CD = torch.stack(centres)
        distances_CC = torch.cdist(centres_CD, centres_CD).fill_diagonal_(torch.inf)
        largest = distances_CC.min(1).values.max().item()
        margin = min(largest, self.hparams.margin_threshold)
        loop(self, samples_PD, labels_P, margin, self.hparams.server_epochs)
        return self.transform(self.vectors_CD).detach()


class BareFederation:
    """Two worker processes, each with all clients' data and models; they live until `close`."""

    def __init__(self, settings: Settings, clients: int, workers: int = 2) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.jobs = spawn.Queue()
        self.done = spawn.Queue()
        arguments = (settings, clients, self.jobs, self.done)
        self.workers = []
        for _ in range(workers):
            worker = spawn.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            self.workers.append(worker)
        for _ in self.workers:
            self.done.get()

        sizes = []
        for index in range(clients):
            data = open_client_data(
                settings.data, seed=settings.run.seed, partition=index, num_partitions=clients
            )
            sizes.append(len(data.train_labels))
        self.order = sorted(range(clients), key=lambda index: -sizes[index])
        self.merge = averages
        if settings.run.algo == "fedtgp":
            self.merge = TrainedPrototypes(settings, len(data.classes))
        self.table: Tensor | None = None
        self.held: Tensor | None = None

    def round(self) -> float:
        """Do one round of all clients; return its wall-clock seconds."""
        start = time.perf_counter()
        for index in self.order:
            self.jobs.put((index, self.table, self.held))
        replies = [self.done.get() for _ in self.order]
        counts = torch.stack([torch.from_numpy(count) for _, count in replies]).float()
        means = torch.stack([torch.from_numpy(mean) for mean, _ in replies])
        self.table = self.merge(means, counts)
        self.held = counts.sum(0) > 0
        return time.perf_counter() - start

    def close(self) -> None:
        for _ in self.workers:
            self.jobs.put(None)
        for worker in self.workers:
            worker.join()
