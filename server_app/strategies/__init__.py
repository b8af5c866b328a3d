"""The server half of every algorithm, by its name in the catalog."""

from __future__ import annotations

from server_app.strategies.base import ServerStrategy
from server_app.strategies.fedavg import FedAvg
from server_app.strategies.fedpcl import FedPCL
from server_app.strategies.fedplvm import FedPLVM
from server_app.strategies.fedproto import FedProto
from server_app.strategies.fedproto_avg import FedProtoAvg
from server_app.strategies.fedtgp import FedTGP
from server_app.strategies.local import Local
from server_app.strategies.protofed import ProtoFed

STRATEGIES: dict[str, type[ServerStrategy]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedproto": FedProto,
    "fedtgp": FedTGP,
    "fedpcl": FedPCL,
    "fedplvm": FedPLVM,
    "protofed": ProtoFed,
    "fedproto-avg": FedProtoAvg,
}
