"""All that a method, a network or a metric of your own imports, under one name: ``from protofl.extend import …``."""

# ruff: noqa: E402, F401
from __future__ import annotations

from protofl_common.tools.local import with_halves

with_halves()

from client_app.algorithms.base import ClientAlgorithm as ClientAlgorithm
from client_app.algorithms.fedavg import FedAvg as FedAvgClient
from client_app.client import Client as Client
from client_app.training import Batch as Batch
from client_app.training import LossTerms as LossTerms
from client_app.training import Step as Step
from protofl_common.config.options import option as option
from protofl_common.experiment.catalog import Algorithm as Algorithm
from protofl_common.experiment.catalog import Hparams as Hparams
from protofl_common.maths.prototypes import Prototypes as Prototypes
from protofl_common.maths.prototypes import by_class as by_class
from protofl_common.maths.prototypes import class_means as class_means
from protofl_common.wire.payloads import Payload as Payload
from protofl_common.wire.schema import Counts as Counts
from protofl_common.wire.schema import Exchange as Exchange
from protofl_common.wire.schema import Update as Update
from protofl_common.wire.schema import Vectors as Vectors
from protofl_common.wire.schema import VectorSets as VectorSets
from protofl_common.wire.schema import Weights as Weights
from server_app.replies import Upload as Upload
from server_app.strategies.base import ServerStrategy as ServerStrategy
from server_app.strategies.fedavg import FedAvg as FedAvgServer
