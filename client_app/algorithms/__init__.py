"""The client half of every algorithm, by its name in the catalog."""

from __future__ import annotations

from client_app.algorithms.base import ClientAlgorithm
from client_app.algorithms.fedavg import FedAvg
from client_app.algorithms.fedpcl import FedPCL
from client_app.algorithms.fedplvm import FedPLVM
from client_app.algorithms.fedproto import FedProto
from client_app.algorithms.fedproto_avg import FedProtoAvg
from client_app.algorithms.fedtgp import FedTGP
from client_app.algorithms.local import Local
from client_app.algorithms.protofed import ProtoFed

ALGORITHMS: dict[str, type[ClientAlgorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedproto": FedProto,
    "fedtgp": FedTGP,
    "fedpcl": FedPCL,
    "fedplvm": FedPLVM,
    "protofed": ProtoFed,
    "fedproto-avg": FedProtoAvg,
}
