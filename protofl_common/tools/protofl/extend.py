"""All that a method, a network or a metric of your own imports.

It needs nothing that Flower's bundle lacks.
"""

from protofl_common.experiment.settings import with_halves

with_halves()

from client_app.algorithms.base import ClientAlgorithm, ClientView  # noqa: E402
from client_app.algorithms.fedavg import FedAvg as FedAvgClient  # noqa: E402
from client_app.learning.training import Batch, LossTerms, Step  # noqa: E402
from protofl_common.algorithms.base import Algorithm, Hparams  # noqa: E402
from protofl_common.config.options import option  # noqa: E402
from protofl_common.maths.prototypes import Prototypes, by_class, class_means  # noqa: E402
from protofl_common.wire.payloads import Payload  # noqa: E402
from protofl_common.wire.schema import Counts, Exchange, Update, Vectors, VectorSets, Weights  # noqa: E402
from server_app.run.replies import Upload  # noqa: E402
from server_app.strategies.base import ServerStrategy  # noqa: E402
from server_app.strategies.fedavg import FedAvg as FedAvgServer  # noqa: E402

__all__ = [
    "Algorithm",
    "Batch",
    "ClientAlgorithm",
    "ClientView",
    "Counts",
    "Exchange",
    "FedAvgClient",
    "FedAvgServer",
    "Hparams",
    "LossTerms",
    "Payload",
    "Prototypes",
    "ServerStrategy",
    "Step",
    "Update",
    "Upload",
    "VectorSets",
    "Vectors",
    "Weights",
    "by_class",
    "class_means",
    "option",
]
