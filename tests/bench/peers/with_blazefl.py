"""The job in BlazeFL 2, with its FedAvg for one process and this job's training loop.

BlazeFL's own loop reads a DataLoader, which takes the samples one by one. The job's loop is
faster, and it is the one that Flower's clients have here.
"""

from enum import StrEnum

import torch
from blazefl.contrib.fedavg import (  # type: ignore[import-not-found]
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgUplinkPackage,
)
from blazefl.core import deserialize_model, serialize_model  # type: ignore[import-not-found]
from job import Clock, Network, arguments, train  # type: ignore[import-not-found]
from torch import Tensor

job, data, _ = arguments()
clock = Clock()


class Name(StrEnum):
    """BlazeFL selects models by an enumeration."""

    CNN = "cnn"


class Selector:
    def select_model(self, model_name: Name) -> Network:
        return Network()


class Users:
    """A user's images as BlazeFL asks for them; what it calls a loader is the user's data."""

    def get_dataloader(
        self, type_: str, cid: int, batch_size: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        inputs, labels = data.of(cid)
        return inputs, labels


class Trainer(FedAvgBaseClientTrainer):  # type: ignore[misc]
    def train(
        self, model_parameters: Tensor, train_loader: tuple[Tensor, Tensor], cid: int
    ) -> FedAvgUplinkPackage:
        deserialize_model(self.model, model_parameters)
        inputs, labels = train_loader
        train(self.model, inputs, labels, job)
        return FedAvgUplinkPackage(cid, serialize_model(self.model), len(labels))


server = FedAvgBaseServerHandler(
    Selector(),
    Name.CNN,
    Users(),
    global_round=job.rounds,
    num_clients=job.users,
    sample_ratio=job.asked / job.users,
    device="cpu",
    batch_size=job.batch,
    seed=0,
)
clients = Trainer(
    Selector(),
    Name.CNN,
    Users(),
    device="cpu",
    num_clients=job.users,
    epochs=1,
    batch_size=job.batch,
    lr=job.lr,
    seed=0,
)
# BlazeFL leaves the loop over rounds to its user
while not server.if_stop():
    clients.local_process(server.downlink_package(), server.sample_clients())
    for upload in clients.uplink_package():
        server.load(upload)
    clock.tick()
clock.report(server.model.accuracy(data))
