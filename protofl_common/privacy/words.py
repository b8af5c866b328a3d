"""The protections of a run in words, for its first lines and its page."""

from __future__ import annotations

from collections.abc import Mapping

from protofl_common.config.options import Scalar
from protofl_common.config.sections import FEWEST_TESTED


def protections(settings: Mapping[str, Scalar]) -> list[str]:
    """A line for each protection that the settings ask for; a site may add to them."""
    lines = []
    if (least := settings.get("min-class-samples", 1)) != 1:
        lines.append(
            f"small classes: nothing is told of classes and clusters of fewer than {least} training samples, "
            f"nor figures of fewer than {max(FEWEST_TESTED, int(least))} test samples"
        )
    if settings.get("secagg", False):
        lines.append(
            "secure aggregation: the server learns sums over the clients, and no upload, figure or classes of one; "
            "no bound on single sites (liars) can act"
        )
    if settings.get("dp", "none") == "none":
        return lines
    bound = f"at most ε = {settings['dp-epsilon']}, δ = {settings['dp-delta']} for each sample of a client"
    covered = "of all that it sends, with noise: weights, prototypes, numbers of right predictions"
    beside = "not covered: numbers of samples, times of replies"
    whose = "ε in a line is that of the client that the run costs most"
    return [*lines, f"differential privacy: {bound}, {covered}; {beside}; {whose}"]
