"""What never ran: servers without a federation, uploads, and the files of a finished run."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec
from safetensors.numpy import save_file

from protofl_common.config.options import Scalar
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.wire.payloads import Payload
from protofl_common.wire.records import Report
from server_app.run.bounds import bounds_of
from server_app.run.replies import Upload
from server_app.strategies.base import server_half

Accuracies = dict[str, dict[str, float]]
"""Site -> kind -> accuracy in [0, 1]."""


def server_of(algo: str, classes: Iterable[Any] = "ab", **changes: Any) -> Any:
    """Return the server's half of an algorithm, with all that it needs of a federation faked.

    There is one site, with inputs of three numbers. Features have two unless ``changes``, which
    are settings, say otherwise.
    """
    config = default_run_config() | {"algo": algo, "feature-dim": 2, "models": "mlp-1"}
    for key, value in changes.items():
        config[key.replace("__", ".").replace("_", "-")] = value
    settings = Settings.from_run_config(config)

    card: Any = SimpleNamespace(classes=tuple(classes), arch="mlp-1", input_shape=(3,), real=False)
    network = SimpleNamespace(
        settings=settings,
        cards={"site-0": card},
        reference=card,
        bounds=bounds_of(settings, [card]),
        fewest_replies=1,
    )
    return server_half(CATALOG[algo])(network)


def upload(site: str, samples: int = 10, **entries: Any) -> Upload:
    """Return a site's valid upload in round 1, after training on so many samples.

    ``entries`` are those of its payload.
    """
    return Upload(site, Payload(**entries), Report(1, samples, 0))


def task(kind: TaskType, authority: str | None = None) -> ExecutionSpec:
    """Return a task as Flower hands it out, insecure without an ``authority``'s certificate."""
    return ExecutionSpec(
        task_type=kind,
        runtime_api_address="127.0.0.1:1",
        token="token",
        insecure=authority is None,
        root_certificates_path=authority,
        runtime_dependency_install=True,
        parent_pid=1,
        suppress_output=False,
        task_id=1,
    )


def submission(run_id: int, sub_status: str = "failed", details: str = "", **config: Any) -> Any:
    """Return a run as a SuperLink lists it, submitted ``run_id`` seconds after ten o'clock.

    ``config`` are the settings that it was submitted with.
    """
    return SimpleNamespace(
        run_id=run_id,
        pending_at=f"2026-11-22T10:{run_id // 60:02}:{run_id % 60:02}+00:00",
        fab_hash="6f3a91c2" * 8,
        status=SimpleNamespace(status="finished", sub_status=sub_status, details=details),
        override_config={key.replace("_", "-"): value for key, value in config.items()},
        account_name="none",
    )


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
    """Write the folder of a finished run with these accuracies; the last are the final ones.

    The first site has 10 test samples, the second 20, and so on. ``validation`` are accuracies on
    validation data, of which a site has the more samples the fewer test samples it has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text("")

    rows = []
    for number, accuracies in enumerate(evaluations):
        rows.append(_evaluation(number, accuracies) | {"server": server or {}})
    rows[-1]["kind"] = "final"
    for record, accuracies in zip(rows, validation or (), strict=False):
        validated = _evaluation(record["round"], accuracies)
        record["validation"] = validated["accuracy"]
        for site, client in validated["clients"].items():
            record["clients"][site]["validation"] = client["accuracy"]
            record["clients"][site]["validation-samples"] = 100 // client["test-samples"]
    (folder / "metrics.jsonl").write_text(_json_lines(rows), encoding="utf-8")

    accuracy = rows[-1]["accuracy"]
    domain_of = domains or {}
    summary = {
        "algorithm": "Fake",
        "clients": {
            site: {"arch": "cnn4", "domain": domain_of.get(site)} for site in evaluations[-1]
        },
        "rounds": len(rows) - 1,
        "accuracy": accuracy,
        "best-accuracy": {kind: value | {"after-round": 1} for kind, value in accuracy.items()},
        "bytes": {"up": 1000, "down": 2000},
        "trouble": {"missing": 2, "late": 1},
        "seconds": 61.0,
        "seconds-per-round": 1.5,
        "settings": settings,
        "warnings": list(warnings),
        "division": division,
        "metrics": {},
        "stopped-early": False,
        "versions": {},
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def _evaluation(number: int, accuracies: Accuracies) -> dict[str, Any]:
    """Return a row of ``metrics.jsonl`` with these accuracies; all their summaries are the mean."""
    clients = {}
    kinds: set[str] = set()
    for index, (site, accuracy) in enumerate(accuracies.items()):
        clients[site] = {"accuracy": accuracy, "test-samples": 10 * (index + 1)}
        kinds |= accuracy.keys()

    figures = {}
    for kind in sorted(kinds):
        mean = sum(accuracy[kind] for accuracy in accuracies.values()) / len(accuracies)
        figures[kind] = dict.fromkeys(("mean", "weighted", "worst-10%", "std"), mean)
    return {
        "kind": "round",
        "round": number,
        "evaluated-after-round": number,
        "accuracy": figures,
        "clients": clients,
        "asked": len(clients),
        "valid": len(clients),
        "bytes": {"up": 400, "down": 800 * number},
    }


def row(number: int, sites: list[str], kind: str = "round", **more: Any) -> dict[str, Any]:
    """Return a row of ``metrics.jsonl`` whose accuracies rise from round to round.

    ``more`` are further entries, or others in the place of these.
    """
    losses = {"total": 1 / number, "cross-entropy": 0.5 / number, "prototype": 0.5 / number}
    clients = {}
    shares = []
    for index, site in enumerate(sites):
        share = min(1.0, 0.01 * number + 0.001 * index)
        shares.append(share)
        clients[site] = {
            "accuracy": {"head": share, "prototype": share / 2},
            "train-samples": 30,
            "test-samples": 10,
            "losses": losses,
            "seconds": {"load": 0.1, "train": 1.0},
        }
    figures = {"mean": float(np.mean(shares)), "weighted": 0.5, "worst-10%": 0.1, "std": 0.1}
    phases = {"load": 1.0, "train": 9.0}
    return {
        "kind": kind,
        "round": number,
        # clients are evaluated before they train, and at the end once more
        "evaluated-after-round": number - 1 if kind == "round" else number,
        "accuracy": {"head": figures, "prototype": figures},
        "losses": losses,
        "bytes": {"up": 1000, "down": 2000},
        "asked": len(sites),
        "valid": len(sites),
        "void": False,
        "failed": {},
        "refused": {},
        "missing": [],
        "late": {},
        "clients": clients,
        "seconds": {"total": 2.0, "exchange": 1.5, "aggregate": 0.5, "clients": phases},
        **more,
    }


def _json_lines(records: Iterable[object]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    """Write a run's folder with these rows and settings, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"algo": "fedtgp", "rounds": 9} | settings
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (folder / "settings.toml").write_text(text, encoding="utf-8")
    (folder / "metrics.jsonl").write_text(_json_lines(rows), encoding="utf-8")
    return folder


def write_prototypes(
    folder: Path, sites: list[str], classes: list[str], rounds: int, **facts: Any
) -> None:
    """Write what a run of FedTGP records of its prototypes, here random ones of 16 numbers.

    ``facts`` are further entries of each site's introduction.
    """
    rng = np.random.default_rng(0)
    number = len(classes)

    margins = []
    for round_number in range(1, rounds + 1):
        overall = rng.uniform(1, 2, number).tolist()
        # None: no client has the first class
        clients = {site: [None, *rng.uniform(0, 2, number - 1).tolist()] for site in sites}
        margins.append({"round": round_number, "global": overall, "clients": clients})
    (folder / "prototypes.jsonl").write_text(_json_lines(margins), encoding="utf-8")

    arrays = {
        "means": rng.normal(size=(number * len(sites), 16)).astype(np.float32),
        "labels": np.tile(np.arange(number), len(sites)),
        "owners": np.repeat(np.arange(len(sites)), number),
        "global-means": rng.normal(size=(number, 16)).astype(np.float32),
        "global-labels": np.arange(number),
    }
    metadata = {"sites": json.dumps(sites), "round": str(rounds)}
    save_file(arrays, folder / "client-prototypes.safetensors", metadata=metadata)

    introductions = {}
    for site in sites:
        counts = rng.integers(0, 50, number).tolist()
        introductions[site] = {"train-classes": counts, "arch": "cnn4", "domain": "", **facts}
    content = {"algorithm": "FedTGP", "classes": classes, "sites": introductions}
    text = json.dumps(content, ensure_ascii=False)
    (folder / "sites.json").write_text(text, encoding="utf-8")
