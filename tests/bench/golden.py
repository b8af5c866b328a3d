"""The figures of every algorithm in small federations, to the last bit, before and after a change.

    python -m tests.bench.golden record before.json
    python -m tests.bench.golden compare before.json

Figures belong to a machine and a PyTorch; so they are recorded where they are compared, and not
kept in the repository. Compared are the rounds' metrics without times, the summary's accuracies,
and every tensor that the server leaves.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from protofl_common.experiment.catalog import CATALOG
from tests.bench.printing import parser_of
from tests.support.harness import LONG, run_config, run_federation
from tests.support.results import digests, without_times

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"train_samples": 20, "test_samples": 40},
    # Wide linear layers, batch normalisation's absence, unequal shares, a sample of the clients.
    "wide": {
        "partition": "dirichlet",
        "alpha": 0.5,
        "train_samples": 0,
        "total_samples": 300,
        "test_samples": 40,
        "models": "htcnn-3",
        "momentum": 0.9,
        "weight_decay": 0.01,
        "keep_optimizer": True,
        "participation": 0.7,
        "batch_size": 8,
        "rounds": 3,
        "feature_dim": 32,
    },
    # Few labels, batch normalisation, Adam.
    "few": {
        "models": "resnet4-imagenet-stem",
        "optimizer": "adam",
        "lr": 0.002,
        "positive_rate": 0.5,
        "pu_weight": 0.5,
        "train_samples": 24,
        "test_samples": 40,
        "local_epochs": 2,
        "keep_optimizer": True,
    },
}


def figures(algo: str, settings: dict[str, Any]) -> Any:
    """Run an algorithm; return metrics and a digest of each tensor of the files it leaves.

    They are as they will be read from a file of JSON, with which they are compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), algo=algo, image_size=0, **settings) | LONG
        outcome = run_federation(config, clients=4)
        tensors = digests(outcome.folder)
    summary = {key: value for key, value in outcome.summary.items() if "accuracy" in key}
    found = {"rows": without_times(outcome.rows), "summary": summary, "tensors": tensors}
    return json.loads(json.dumps(found))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="one algorithm")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(arguments.file.read_text()) if arguments.what == "compare" else {}
    differ = 0
    for algo in [arguments.only] if arguments.only else known or CATALOG:
        for name, settings in SETTINGS.items():
            found = figures(algo, settings)
            if arguments.what == "record":
                known.setdefault(algo, {})[name] = found
            elif found != known[algo][name]:
                differ += 1
                print(f"{algo} {name}: {_first_difference(known[algo][name], found)}", flush=True)
    if arguments.what == "record":
        arguments.file.write_text(json.dumps(known))
    print(f"{differ} differ" if arguments.what == "compare" else f"recorded {', '.join(known)}")
    return int(differ > 0)


def _first_difference(before: Any, after: Any, path: str = "") -> str:
    """Return where two figures first differ, as keys and positions, and both values there."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            if before.get(key) != after.get(key):
                return _first_difference(before.get(key), after.get(key), f"{path}/{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                return _first_difference(one, other, f"{path}/{index}")
    return f"{path}: {before!r} -> {after!r}"


if __name__ == "__main__":
    sys.exit(main())
