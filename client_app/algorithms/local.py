"""Local (also called Solo): every client trains alone. Nothing is received, nothing is sent.

Other half: `server_app/strategies/local.py`.
"""

from __future__ import annotations

from client_app.algorithms.base import ClientAlgorithm


class Local(ClientAlgorithm):
    """Cross-entropy on the client's own data."""
