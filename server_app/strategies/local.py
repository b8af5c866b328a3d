"""Local (also called Solo): the server only asks the clients how they fare.

Other half: `client_app/algorithms/local.py`.
"""

from __future__ import annotations

from server_app.strategies.base import ServerStrategy


class Local(ServerStrategy):
    """Nothing goes down, nothing comes up."""
