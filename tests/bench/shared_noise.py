"""Accuracy against ε: noise of each site alone, and noise that the sites of a sum share.

    python -m tests.bench.shared_noise [--data-dir FOLDER] [--seeds 1 2 3]

Gaussian heads behind one embedded backbone (glyphs), secure aggregation, four sites, one exchange.
The accuracy is the exact one, of the model that the run leaves, on the test samples of all sites:
the figures of a private run have noise of their own. ``--data-dir`` holds FashionMNIST/raw. The
last column has next to no noise: what it loses beside a run without ``dp`` is by cutting features.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from client_app.learning.data import Samples
from protofl_common.models.trained import TrainedModel
from tests.bench.printing import markdown, of_seeds, parser_of
from tests.support.harness import client_of, run_config, run_federation

SITES = 4
HONEST = 3  # of them: what the default threshold allows
EPSILONS = (1.0, 2.0, 4.0, 8.0, 1e4)
COMMON: dict[str, Any] = {
    "algo": "gaussian",
    "rounds": 1,
    "test_samples": 0,
    "backbones": "glyphs",
    "secagg": True,
}
NOISES: dict[str, dict[str, Any]] = {
    "each site's": {"dp": "sample", "dp_honest_sites": 1},
    f"shared by {HONEST}": {"dp": "sample", "dp_honest_sites": HONEST},
}


def data_sets(data_dir: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each data set; Fashion-MNIST only if its folder is given."""
    sets: dict[str, dict[str, Any]] = {
        "digits of five looks": {
            "dataset": "digit-domains",
            "partition": "iid",
            "train_samples": 0,
        },
    }
    if data_dir:
        sets["Fashion-MNIST, 1,500 images a site"] = {
            "dataset": "fashion-mnist",
            "data_dir": data_dir,
            "partition": "iid",
            "train_samples": 1500,
            "test_samples": 500,
        }
    return sets


def exact_accuracy(settings: dict[str, Any]) -> float:
    """Run once, and test the head that the run leaves on the test samples of all sites."""
    with TemporaryDirectory() as folder:
        config = run_config(Path(folder), **COMMON | settings)
        outcome = run_federation(config, SITES)
        left = outcome.folder / "clients" / "site-0" / "model.safetensors"
        model = TrainedModel.read(left).build().double()
        parts = [client_of(config, site, SITES).test_set for site in range(SITES)]
        right = sum(int(hits(model, part).sum()) for part in parts)
        return right / sum(len(part) for part in parts)


def hits(model: torch.nn.Module, part: Samples) -> torch.Tensor:
    """Return for each sample whether the model predicts its label."""
    with torch.inference_mode():
        return model(part.in_memory.double()).argmax(1) == part.labels


def mean_and_deviation(settings: dict[str, Any], seeds: list[int]) -> str:
    return of_seeds([100 * exact_accuracy(settings | {"seed": seed}) for seed in seeds])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()

    heads = ["data", "noise", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)]
    rows = []
    for data, settings in data_sets(arguments.data_dir).items():
        rows.append([data, "none", mean_and_deviation(settings, arguments.seeds)])
        for name, noise in NOISES.items():
            row = [data, name]
            for epsilon in EPSILONS:
                private = settings | noise | {"dp_epsilon": epsilon}
                row.append(mean_and_deviation(private, arguments.seeds))
            rows.append(row)

    for row in rows:
        row += [""] * (len(heads) - len(row))
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
