"""The client half of every algorithm; the catalog says where it stands."""

from __future__ import annotations

from typing import Any

from client_app.algorithms.base import ClientAlgorithm
from protofl_common.experiment.catalog import Algorithm, half


def client_half(row: Algorithm) -> type[ClientAlgorithm[Any]]:
    """The class that ``row`` names."""
    return half(row.client, ClientAlgorithm)
