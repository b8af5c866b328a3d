"""What a client may tell of its data for the run's report, and when.

Three levels (setting ``insight``), each with what the one before it has:

    ``none``      nothing
    ``summary``   how many training samples of each class it has; with frozen backbones, how much of its prototypes each
                  backbone alone explains (FedPCL, Figure 3)
    ``features``  up to `MAX_FEATURES` of its test features and their labels (FedTGP, Figure 6)

It is told once, in the reply to the final evaluation, never during training. The default is ``none``: several papers
promise that no class counts cross the wire, so a figure must not make them. In a simulation the report shows the
division of the data all the same: the server divides the data set once more by itself (`datasets/clients.py`).
A site with data of its own tells nothing, whatever the run asks for, unless its node config says ``insight=true``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_FEATURES = 200
"""Test samples of a client whose features may be told."""


@dataclass(frozen=True)
class Insight:
    """What one client tells."""

    counts: Tensor
    """[C] int64: labelled training samples of each class."""
    similarity: Tensor | None = None
    """[K] float32, in [-1, 1]: for each frozen backbone, how alike the prototypes of it alone and of all are."""
    features: Tensor | None = None
    """[N, D] float32: test samples in the space of the prototypes."""
    labels: Tensor | None = None
    """[N] int64: their classes."""
