"""The server half of every algorithm; the catalog says where it stands."""

from typing import Any

from protofl_common.basics.files import digest
from protofl_common.basics.text import printable
from protofl_common.experiment.catalog import CATALOG, Algorithm, half
from server_app.network.membership import Federation, FederationError
from server_app.strategies.base import ServerStrategy


def built(federation: Federation) -> ServerStrategy[Any]:
    """The run's server half, on the majority's model; a site whose introduction does not give its model is left out.

    Another package's half may keep its weights in an order of its own: their digest is not compared.
    """
    while True:
        try:
            strategy = server_half(federation.settings.row)(federation)
            shared = strategy.shared()
            if not shared or federation.settings.run.algo not in CATALOG or digest(shared) == strategy.card.weights:
                return strategy
            raise ValueError(f"its arch and input_shape do not give the weights that it claims ({strategy.card.arch})")
        except FederationError:
            raise
        except (RuntimeError, ValueError) as error:
            if not federation.leave_out_reference(printable(str(error))):
                raise


def server_half(row: Algorithm) -> type[ServerStrategy[Any]]:
    return half(row.server, ServerStrategy)
