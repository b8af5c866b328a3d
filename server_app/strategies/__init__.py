"""The server half of every algorithm; the catalog says where it stands."""

from __future__ import annotations

from typing import Any

from protofl_common.catalog import Algorithm, half
from server_app.strategies.base import ServerStrategy


def server_half(row: Algorithm) -> type[ServerStrategy[Any]]:
    """The class that ``row`` names."""
    return half(row.server, ServerStrategy)
