"""What protects the clients' samples in a run, for people: before its first round and on its page."""

from __future__ import annotations

from collections.abc import Mapping

from protofl_common.config.options import Scalar


def protections(settings: Mapping[str, Scalar]) -> list[str]:
    """A line for each protection that the settings ask for; a site may add to them."""
    lines = []
    if (least := settings.get("min-class-samples", 1)) != 1:
        lines.append(f"small classes: nothing is told of classes and clusters of fewer than {least} training samples")
    for what in ("prototype", "image"):
        if (noise := settings.get(f"{what}-noise", "none")) != "none":
            lines.append(f"noise on {what}s ({noise}), as in papers: no guarantee")
    if settings.get("secagg", False):
        lines.append(
            "secure aggregation: the server learns sums over the clients, no single upload and no classes of one; "
            "max-norm-ratio, max-samples-ratio and max-samples-lead cannot act"
        )
    if settings.get("dp", "none") == "none":
        return lines
    covered = "weights alone, and not prototypes" if settings["dp"] == "weights" else "weights and prototypes"
    bound = f"at most ε = {settings['dp-epsilon']}, δ = {settings['dp-delta']} for each training sample"
    beside = "not covered: numbers of samples, accuracies, times"
    whose = "ε in a line is that of the client with the fewest training samples"
    return [*lines, f"differential privacy: {bound}, of {covered}; {beside}; {whose}"]
