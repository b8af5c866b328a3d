"""FedProto and FedTGP of HtFLlib beside ours, round by round, on its division of CIFAR-10.

    python -m tests.bench.curves --htfllib H --pfllib P --images cifar10.npz --out OUT

The table is printed at the end. The division is that of ``dataset/utils/dataset_utils.py`` in
PFLlib, to which HtFLlib's README points for data: pathological (2 classes a client) and practical
(Dirichlet 0.1), 20 clients, three quarters of a client's samples for training; a seed is another
division, and seed 1 is the scripts' own. Both engines get the same samples in the same scale and
networks of the same shapes. Both test before they train, over all test samples, by the nearest
prototype. Finished runs stay in ``OUT/curves.json``. ``--images`` holds x_train uint8
[N, 32, 32, 3] and y_train [N].
"""

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch

from protofl_common.config.architectures import architecture_of
from protofl_common.experiment.settings import Settings, default_run_config
from tests.bench import htfllib
from tests.bench.printing import markdown, of_seeds, parser_of
from tests.bench.round_speed import CLIENTS, METHODS
from tests.support.harness import run_federation

DIVISIONS = {"pathological": "pat", "practical": "dir"}  # name -> the generator's
SETTING = {
    "dataset": "arrays",
    "partition": "natural",
    "test-from": "official-own",
    "train-samples": 0,
    "models": "htcnn8",
    "feature-dim": 512,
    "batch-size": 10,
    "local-epochs": 1,
    "lr": 0.01,
    "momentum": 0.0,
    "drop-last": True,
    "initial-weights": "shared",
    "report": False,
    "fedproto.weighting": "uniform",
}


def write_arrays(file: Path, options: argparse.Namespace, division: str, seed: int) -> None:
    """Write the first samples of every class, divided by PFLlib's generator.

    Beside inputs and labels the file has the client of each sample, and its part.
    """
    with np.load(options.images) as packed:
        images = packed["x_train"]
        labels = packed["y_train"].astype(np.int64)
    first = [np.flatnonzero(labels == label)[: options.samples // 10] for label in range(10)]
    rows = np.concatenate(first)
    # For the file of settings that the scripts write, which is not needed.
    sys.modules["ujson"] = MagicMock()
    sys.path.insert(0, str(options.pfllib / "dataset" / "utils"))
    utils = importlib.import_module("dataset_utils")
    np.random.seed(seed)  # noqa: NPY002 -- the generator's scripts draw from it
    chosen = {"niid": True, "partition": DIVISIONS[division], "class_per_client": 2}
    # in the place of images the generator divides their rows
    dealt, of_clients, _ = utils.separate_data((rows, labels[rows]), CLIENTS, 10, **chosen)
    train, test = utils.split_data(dealt, of_clients)
    order: list[int] = []
    columns: dict[str, list[str]] = {"client": [], "split": []}
    for part, owners in (("train", train), ("test", test)):
        for client, own in enumerate(owners):
            order += own["x"].tolist()
            columns["client"] += [f"{client:02}"] * len(own["x"])
            columns["split"] += [part] * len(own["x"])
    np.savez(file, inputs=images[order].transpose(0, 3, 1, 2), labels=labels[order], **columns)


def curves(
    options: argparse.Namespace, division: str, seed: int, method: str
) -> dict[str, list[float]]:
    """Return for each engine the accuracies after rounds 1, 2, …"""
    folder = options.out / f"{division}-{seed}"
    file = folder / "division.npz"
    config = default_run_config() | SETTING | METHODS[method]
    config |= {
        "data-dir": str(file),
        "seed": seed,
        "rounds": options.rounds,
        "out-dir": str(folder / method),
    }
    settings = Settings.from_run_config(config)
    if not (folder / "dataset").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_arrays(file, options, division, seed)
        htfllib.write_division(folder, settings, CLIENTS)
    networks = [
        htfllib.network(architecture_of(settings.model.models, i), 3, 32) for i in range(CLIENTS)
    ]
    theirs = htfllib.finished(
        options.htfllib,
        folder,
        settings,
        CLIENTS,
        options.rounds,
        threads=1,
        models=networks,
        num_classes=10,
    )
    rows = run_federation(config, CLIENTS).rows
    ours = [
        row["accuracy"]["prototype"]["weighted"] for row in rows if row["evaluated-after-round"]
    ]
    return {"ours": ours, "HtFLlib": theirs["accuracy"][1:]}


def table(done: dict[str, dict[str, list[float]]], rounds: list[int]) -> None:
    """Print mean ± standard deviation over the seeds, after ``rounds`` and in the best round.

    The rows are the two engines, and their differences seed by seed.
    """
    chosen = [number - 1 for number in rounds]
    rows = []
    for name in dict.fromkeys(key.rpartition("/")[0] for key in done):
        runs = [run for key, run in done.items() if key.startswith(f"{name}/")]
        engines: dict[str, np.ndarray] = {}  # [seeds, rounds and the best]
        for engine in ("ours", "HtFLlib"):
            of_rounds = 100 * np.array([run[engine] for run in runs])
            best = of_rounds.max(axis=1, keepdims=True)
            engines[engine] = np.concatenate([of_rounds[:, chosen], best], axis=1)
        engines["difference"] = engines["ours"] - engines["HtFLlib"]
        for engine, shares in engines.items():
            cells = [of_seeds(column.tolist()) for column in shares.T]
            rows.append([f"{name.replace('/', ', ')}, {engine}", str(len(runs)), *cells])
    print(markdown(["", "seeds", *map(str, rounds), "best"], rows))


def main() -> None:
    parser = parser_of(__doc__)
    for name in ("htfllib", "pfllib", "images", "out"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--divisions", nargs="*", default=list(DIVISIONS), choices=list(DIVISIONS))
    parser.add_argument(
        "--show", type=int, nargs="*", default=[1, 2, 4, 8], help="rounds of the table"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.out / "curves.json"
    done = json.loads(file.read_text()) if file.exists() else {}
    for seed, division, method in itertools.product(options.seeds, options.divisions, METHODS):
        key = f"{division}/{method}/{seed}"
        if key not in done:
            done[key] = curves(options, division, seed, method)
            file.write_text(json.dumps(done))
    table(done, options.show)


if __name__ == "__main__":
    main()
