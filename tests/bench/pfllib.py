"""FedAvg and FedProto of PFLlib's own code beside ours, on our division, from the same weights.

    python -m tests.bench.pfllib --pfllib P --data-dir DATA --out OUT

The setting is that of configs/tables/pfllib-fmnist.yaml, but for the number of samples. Each engine
has batches of its own, and --draws lets PFLlib draw its batches several times. A line holds the
accuracy over all test samples after rounds 1, 2, …
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from protofl_common.basics.seeding import derive_seed
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.models.build import build_model
from protofl_common.tools.tables.plan import Run, plan
from protofl_common.tools.tables.spec import read_table
from tests.bench import htfllib
from tests.bench.leaderboard import TABLE
from tests.bench.printing import parser_of
from tests.support import ROOT
from tests.support.harness import run_federation

CLIENTS = 20
SERVERS = {"FedAvg": "serveravg", "FedProto": "serverproto"}
WEIGHTS = "first.pt"


def ours(run: Run, changes: dict[str, Any], what: str) -> list[float]:
    """Run our engine; return the accuracies of this kind after rounds 1, 2, …"""
    outcome = run_federation(default_run_config() | run.config | changes, CLIENTS)
    accuracies = []
    for row in outcome.rows:
        if row["evaluated-after-round"] and row["accuracy"]:
            accuracies.append(100 * row["accuracy"][what]["weighted"])
    return accuracies


def theirs(library: Path, folder: Path, name: str, settings: Settings, draw: int) -> list[float]:
    """Run PFLlib's server in a process of its own, from our first weights.

    Return the accuracies after rounds 1, 2, … ``draw`` seeds the order of its batches.
    """
    htfllib.write_division(folder, settings, CLIENTS)
    model = build_model(
        "cnn4",
        input_shape=(1, 28, 28),
        num_classes=10,
        feature_dim=settings.model.feature_dim,
        seed=derive_seed(settings.run.seed, "model", "global"),
    )
    (folder / "system").mkdir(exist_ok=True)
    torch.save(list(model.state_dict().values()), folder / "system" / WEIGHTS)
    options = htfllib.defaults(library) | htfllib.OPTIONS
    options |= {"algorithm": name, "num_clients": CLIENTS, "global_rounds": settings.run.rounds}
    options |= {"device": "cpu", "num_classes": 10, "draw": draw}
    environment = os.environ | {"PYTHONPATH": f"{library / 'system'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.pfllib", json.dumps(options)],
        cwd=folder / "system",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return [100 * share for share in json.loads(done.stdout.splitlines()[-1])[1:]]


def run_theirs(options: dict[str, Any]) -> list[float]:
    """Be PFLlib's process: return the test accuracy before each round, and after the last."""
    for name in ("h5py", "utils.dlg"):  # for its file of results, and an attack on gradients
        sys.modules[name] = MagicMock()
    models = importlib.import_module("flcore.trainmodel.models")
    model = models.FedAvgCNN(in_features=1, num_classes=10, dim=1024)
    for mine, first in zip(model.parameters(), torch.load(WEIGHTS), strict=True):
        mine.data.copy_(first)
    torch.manual_seed(options["draw"])
    name = options["algorithm"]
    if name == "FedProto":  # which wants body and head apart
        head = model.fc
        model.fc = torch.nn.Identity()
        model = models.BaseHeadSplit(model, head)
    server = importlib.import_module(f"flcore.servers.{SERVERS[name]}")
    run = getattr(server, name)(SimpleNamespace(**{**options, "model": model}), 0)
    run.save_global_model = run.save_results = lambda: None
    run.train()
    return run.rs_test_acc


def main() -> None:
    parser = parser_of(__doc__)
    for name in ("pfllib", "out"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--samples", type=int, default=7000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--only", choices=SERVERS, nargs="+", default=list(SERVERS))
    parser.add_argument("--columns", nargs="+", help="of the table; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = {"total-samples": options.samples, "rounds": options.rounds, "evaluate-every": 1}
    table = read_table(TABLE)
    cells = plan(
        table,
        data_dir=options.data_dir,
        seeds=options.seeds,
        only=tuple(options.only),
        overrides=changes,
    )
    for cell in cells:
        if not cell.asked or cell.column not in (options.columns or table.columns):
            continue
        for seed, run in cell.runs.items():
            folder = options.out / run.name
            folder.mkdir(parents=True, exist_ok=True)
            here = {"out-dir": str(folder), "report": False, "threads": 1}
            curves = {"ours": ours(run, here, cell.figure.what)}
            for draw in range(options.draws):
                curve = theirs(options.pfllib, folder, cell.row, run.settings, draw)
                curves[f"PFLlib, draw {draw}"] = curve
            for engine, curve in curves.items():
                accuracies = " ".join(f"{share:.2f}" for share in curve)
                print(f"{cell.row}, {cell.column}, seed {seed}, {engine}: {accuracies}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(json.dumps(run_theirs(json.loads(sys.argv[1]))))
    else:
        main()
