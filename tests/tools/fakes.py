"""Runs that never ran: the files that a finished one leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protofl_common.config.options import Scalar

Accuracies = dict[str, dict[str, float]]
"""Site -> kind -> accuracy in [0, 1]."""


def write_run(
    folder: Path,
    settings: dict[str, Scalar],
    evaluations: list[Accuracies],
    domains: dict[str, str] | None = None,
    server: dict[str, float] | None = None,
    validation: list[Accuracies] | None = None,
) -> None:
    """A finished run: the last of ``evaluations`` is the final one; site i of n has 10 · (i + 1) test samples.

    ``validation``: the same on validation data, of as many samples.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text("")
    rows = [_row(number, accuracies, number + 1 == len(evaluations)) for number, accuracies in enumerate(evaluations)]
    for row in rows:
        row["server"] = server or {}
    for row, found in zip(rows, validation or (), strict=False):
        of_samples = _row(row["round"], found, False)
        row["validation"] = of_samples["accuracy"]
        for site, client in of_samples["clients"].items():
            more = {"validation": client["accuracy"], "validation-samples": client["test-samples"]}
            row["clients"][site] |= more
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sites = evaluations[-1]
    summary = {
        "algorithm": "Fake",
        "clients": {site: {"arch": "cnn4", "domain": (domains or {}).get(site)} for site in sites},
        "rounds": len(rows) - 1,
        "accuracy": rows[-1]["accuracy"],
        "best-accuracy": {kind: figures | {"after-round": 1} for kind, figures in rows[-1]["accuracy"].items()},
        "bytes": {"up": 1000, "down": 2000},
        "trouble": {"failed": 0},
        "seconds": 61.0,
        "seconds-per-round": 1.5,
        "settings": settings,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def _row(number: int, accuracies: Accuracies, last: bool) -> dict[str, Any]:
    kinds = sorted({kind for of_site in accuracies.values() for kind in of_site})
    means = {kind: sum(of_site[kind] for of_site in accuracies.values()) / len(accuracies) for kind in kinds}
    clients = {
        site: {"accuracy": of_site, "test-samples": 10 * (i + 1)}
        for i, (site, of_site) in enumerate(accuracies.items())
    }
    return {
        "kind": "final" if last else "round",
        "round": number,
        "evaluated-after-round": number,
        "accuracy": {kind: dict.fromkeys(("mean", "weighted", "worst-10%", "std"), means[kind]) for kind in kinds},
        "clients": clients,
        "asked": len(clients),
        "valid": len(clients),
        "bytes": {"up": 400, "down": 800 * number},
    }
