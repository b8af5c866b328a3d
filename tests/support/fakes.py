"""Runs that never ran: the files that a finished one leaves behind."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from protofl_common.config.options import Scalar
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config
from server_app.protections.bounds import bounds_of
from server_app.strategies.base import server_half

Accuracies = dict[str, dict[str, float]]
"""Site -> kind -> accuracy in [0, 1]."""


def server_of(algo: str, classes: Iterable[Any] = "ab", **changes: Any) -> Any:
    """The server's half of an algorithm with these settings, without a federation; feature-dim is 2 unless given."""
    config = default_run_config() | {"algo": algo, "feature-dim": 2, "models": "mlp-1"}
    config |= {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    settings = Settings.from_run_config(config)
    card: Any = SimpleNamespace(classes=tuple(classes), arch="mlp-1", input_shape=(3,), real=False)
    facts = {
        "settings": settings,
        "cards": {"site-0": card},
        "reference": card,
        "bounds": bounds_of(settings, [card]),
    }
    return server_half(CATALOG[algo])(SimpleNamespace(**facts))


def write_run(
    folder: Path,
    settings: dict[str, Scalar],
    evaluations: list[Accuracies],
    domains: dict[str, str] | None = None,
    server: dict[str, float] | None = None,
    validation: list[Accuracies] | None = None,
    warnings: Iterable[str] = (),
    division: int = 1,
) -> None:
    """A finished run: the last of ``evaluations`` is the final one; site i of n has 10 · (i + 1) test samples.

    ``validation``: the same on validation data, of as many samples.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text("")
    rows = [
        _row(number, accuracies, number + 1 == len(evaluations))
        for number, accuracies in enumerate(evaluations)
    ]
    for row in rows:
        row["server"] = server or {}
    for row, found in zip(rows, validation or (), strict=False):
        of_samples = _row(row["round"], found, False)
        row["validation"] = of_samples["accuracy"]
        for site, client in of_samples["clients"].items():
            row["clients"][site] |= {
                "validation": client["accuracy"],
                "validation-samples": client["test-samples"],
            }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracy = rows[-1]["accuracy"]
    best = {kind: figures | {"after-round": 1} for kind, figures in accuracy.items()}
    clients = {
        site: {"arch": "cnn4", "domain": (domains or {}).get(site)} for site in evaluations[-1]
    }
    summary = {"algorithm": "Fake", "clients": clients, "rounds": len(rows) - 1, "accuracy": accuracy,
        "best-accuracy": best, "bytes": {"up": 1000, "down": 2000}, "trouble": {"missing": 2, "late": 1},
        "seconds": 61.0, "seconds-per-round": 1.5, "settings": settings, "warnings": list(warnings),
        "division": division}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))


def _row(number: int, accuracies: Accuracies, last: bool) -> dict[str, Any]:
    kinds = sorted({kind for of_site in accuracies.values() for kind in of_site})
    means = {
        kind: sum(of_site[kind] for of_site in accuracies.values()) / len(accuracies)
        for kind in kinds
    }
    each = enumerate(accuracies.items(), start=1)
    clients = {
        site: {"accuracy": of_site, "test-samples": 10 * number} for number, (site, of_site) in each
    }
    accuracy = {
        kind: dict.fromkeys(("mean", "weighted", "worst-10%", "std"), means[kind]) for kind in kinds
    }
    return {"kind": "final" if last else "round", "round": number, "evaluated-after-round": number,
        "accuracy": accuracy, "clients": clients, "asked": len(clients), "valid": len(clients),
        "bytes": {"up": 400, "down": 800 * number}}  # fmt: skip


def row(number: int, sites: list[str], kind: str = "round", **more: Any) -> dict[str, Any]:
    """One row of ``metrics.jsonl``, with both accuracies rising from round to round."""
    share = {site: min(1.0, 0.01 * number + 0.001 * index) for index, site in enumerate(sites)}
    figures = {
        "mean": float(np.mean(list(share.values()))),
        "weighted": 0.5,
        "worst-10%": 0.1,
        "std": 0.1,
    }
    losses = {"total": 1 / number, "cross-entropy": 0.5 / number, "prototype": 0.5 / number}
    facts = {
        "train-samples": 30,
        "test-samples": 10,
        "losses": losses,
        "seconds": {"load": 0.1, "train": 1.0},
    }
    clients = {
        site: {"accuracy": {"head": one, "prototype": one / 2}, **facts}
        for site, one in share.items()
    }
    seconds = {
        "total": 2.0,
        "exchange": 1.5,
        "aggregate": 0.5,
        "clients": {"load": 1.0, "train": 9.0},
    }
    return {"kind": kind, "round": number, "evaluated-after-round": number - (kind == "round"),
        "accuracy": {"head": figures, "prototype": figures}, "losses": losses, "bytes": {"up": 1000, "down": 2000},
        "asked": len(sites), "valid": len(sites), "void": False, "failed": {}, "refused": {}, "missing": [], "late": {},
        "clients": clients, "seconds": seconds, **more}  # fmt: skip


def write(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    """A run's folder with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{key} = {json.dumps(value)}"
        for key, value in ({"algo": "fedtgp", "rounds": 9} | settings).items()
    ]
    (folder / "settings.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def write_prototypes(
    folder: Path, sites: list[str], classes: list[str], rounds: int, **facts: Any
) -> None:
    """What a run of so many rounds records beside its metrics: random prototypes of 16 numbers."""
    rng = np.random.default_rng(0)
    number = len(classes)
    with (folder / "prototypes.jsonl").open("w", encoding="utf-8") as margins:
        for r in range(1, rounds + 1):
            overall = rng.uniform(1, 2, number).tolist()
            clients = {site: [None, *rng.uniform(0, 2, number - 1).tolist()] for site in sites}
            margins.write(json.dumps({"round": r, "global": overall, "clients": clients}) + "\n")
    labels, owners = (
        np.tile(np.arange(number), len(sites)),
        np.repeat(np.arange(len(sites)), number),
    )
    arrays = {
        "means": rng.normal(size=(len(labels), 16)).astype(np.float32),
        "labels": labels,
        "owners": owners,
    }
    arrays |= {
        "global-means": rng.normal(size=(number, 16)).astype(np.float32),
        "global-labels": np.arange(number),
    }
    told = {"sites": json.dumps(sites), "round": str(rounds)}
    save_file(arrays, folder / "client-prototypes.safetensors", metadata=told)
    same = {"arch": "cnn4", "domain": "", **facts}
    known = {
        site: {"train-classes": rng.integers(0, 50, number).tolist(), **same} for site in sites
    }
    text = json.dumps(
        {"algorithm": "FedTGP", "classes": classes, "sites": known}, ensure_ascii=False
    )
    (folder / "sites.json").write_text(text, encoding="utf-8")
