"""FedPCL: a round on cached backbone features against one that computes them anew, in one process, in one run.

    python -m tests.bench.cached_features --data-dir DIR      # DIR holds Office-10's folders DOMAIN/CLASS/image

Four clients in one process take `fedpcl-office10`'s rounds twice; the second time a client that needs its features
runs the backbones, once for its training images (which serves the epoch and the prototypes) and once for its test
images. A round that ran them in every pass would be slower still, so the ratio is a lower bound.
"""

import argparse
import statistics
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import client_app.client
from protofl_common.backbones.features import extract_features
from protofl_common.experiment.settings import flatten
from tests.support.harness import run_config, run_federation

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "fedpcl-office10.toml"
CLIENTS = 4


def computed_anew(
    images: np.ndarray, names: Sequence[str], device: torch.device, cache_dir: Path, key: str
) -> torch.Tensor:
    """In the place of `cached_features`."""
    return extract_features(images, names, device)


def seconds_per_round(data_dir: str, rounds: int, backbones: str) -> float:
    """Median over the rounds but the first, which fills the cache."""
    recipe = flatten(tomllib.loads(RECIPE.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder)) | recipe
        config |= {"rounds": rounds, "evaluate-every": 1, "data-dir": data_dir, "threads": 1, "backbones": backbones}
        config |= {"out-dir": f"{folder}/runs", "cache-dir": f"{folder}/cache", "join-timeout": 600.0}
        start = time.perf_counter()
        outcome = run_federation(config, CLIENTS)
        total = time.perf_counter() - start
    seconds = [row["seconds"]["total"] for row in outcome.rows if row["kind"] == "round"]
    print(f"  {rounds} rounds {total:.1f} s, of which the first {seconds[0]:.2f} s", flush=True)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--backbones", default="glyphs,fractals,scenes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cached = seconds_per_round(options.data_dir, options.rounds, options.backbones)
    print(f"cached: {cached:.3f} s a round of {CLIENTS} clients")
    client_app.client.cached_features = computed_anew
    anew = seconds_per_round(options.data_dir, options.rounds, options.backbones)
    print(f"computed anew: {anew:.3f} s a round; {anew / cached:.1f} times as long")


if __name__ == "__main__":
    main()
