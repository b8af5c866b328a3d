"""What one slow site costs the others, with and without its late replies.

    python -m tests.bench.slow_site --out DIR

Four sites share the embedded digits. One takes ten times as long as the others, and it alone has
the nines. Time is declared, not measured: a fast site answers after 1, the slow one after 10. A
synchronous round takes as long as the slow site. In the other runs a round closes ``grace`` after
its start, and there are as many rounds as end, with a final evaluation that waits for the slow
site, in `PART` of the synchronous run's time. What a run came to is kept in
``<out>/results.jsonl``: the command, started again, does only what is missing.
"""

import contextlib
import io
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from protofl_common.config.options import SettingsError
from server_app.network.admission import slow_clients
from tests.bench.printing import markdown, of_seeds, parser_of
from tests.support.harness import run_config, run_federation, settings_of

SITES = 4
SLOWNESS = 10
"""The time of the slow site's reply, where a fast site's is 1."""
ROUNDS = 20
"""Of the synchronous run."""
PART = 0.4
"""Of the synchronous run's time, in which the others must have ended."""
GRACE = 3
"""The default of ``grace``: a round lasts that many times the median reply."""
ALPHA = 0.5
"""Of the Dirichlet distribution of the classes under label shift."""
RARE = 9
"""The class that only the slow site has."""
SHIFTS = ("feature", "label")
ALGORITHMS = ("fedproto", "fedproto-avg", "fedavg", "fedtgp")
WAYS = ("synchronous", "discard", "next-round")
SETTINGS: dict[str, Any] = {
    "dataset": "arrays",
    "partition": "natural",
    "models": "mlp-1",
    "train_samples": 0,
    "test_samples": 0,
    "train_fraction": 0.5,
    "batch_size": 10,
    "metrics": "recall",
}
Images = NDArray[np.uint8]
"""[N, 1, 8, 8]."""


def slow_site(seed: int) -> int:
    """Return the number of the site that a run draws as the slow one."""
    names = [f"site-{number}" for number in range(SITES)]
    (name,) = slow_clients(names, 1 / SITES, seed)
    return names.index(name)


def owners_of(labels: NDArray[np.int64], shift: str, seed: int) -> NDArray[np.int64]:
    """Draw whose each sample is. Under feature shift only the nines are not shared out evenly."""
    rng = np.random.default_rng([SHIFTS.index(shift), seed])
    owners = np.empty_like(labels)
    for label in range(10):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = np.full(SITES, 1 / SITES)
        if shift == "label":
            shares = rng.dirichlet(np.full(SITES, ALPHA))
        if label == RARE:
            shares = np.eye(SITES)[slow_site(seed)]
        ends = (np.cumsum(shares) * len(rows)).round().astype(int)[:-1]
        for number, part in enumerate(np.split(rows, ends)):
            owners[part] = number
    return owners


def looks(images: Images, owners: NDArray[np.int64], seed: int) -> Images:
    """Return the images as each site's scanner takes them: as they are, negative, turned, noisy."""
    noise = np.random.default_rng(seed).integers(0, 128, images.shape, dtype=np.uint8)
    seen = (
        images,
        255 - images,
        np.rot90(images, axes=(2, 3)),
        np.maximum(images, noise),
    )
    return np.stack(seen)[owners, np.arange(len(images))]


def write_data(file: Path, shift: str, seed: int) -> None:
    """Write the digits, with the site that each belongs to, as the data set of a run."""
    digits = load_digits()
    images = (digits.images[:, None] * 255 / 16).astype(np.uint8)
    owners = owners_of(digits.target, shift, seed)
    if shift == "feature":
        images = looks(images, owners, seed)
    classes = np.array([str(digit) for digit in range(10)])
    np.savez(file, inputs=images, labels=digits.target, client=owners.astype(str), classes=classes)


def rounds_in_time(grace: int) -> int:
    """Return how many rounds end in time for a final evaluation that waits for the slow site."""
    return int(PART * SLOWNESS * ROUNDS - SLOWNESS) // grace


def pace(way: str, grace: int) -> dict[str, Any]:
    """Return the settings of one way to treat the slow site."""
    if way == "synchronous":
        return {"rounds": ROUNDS}
    return {
        "rounds": rounds_in_time(grace),
        "slow_rate": 1 / SITES,
        "slow_factor": SLOWNESS // grace,
        "late": way,
    }


def tried(shift: str, algo: str, way: str, grace: int, seed: int) -> dict[str, list[float]]:
    """Return three figures for each kind of prediction, after the last round, in percent.

    They are the mean accuracy of the sites, that of the slow site, and its recall of the nines.
    SettingsError where the algorithm refuses late replies.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digits.npz"
        settings = SETTINGS | pace(way, grace)
        config = run_config(Path(folder), data_dir=str(file), algo=algo, seed=seed, **settings)
        settings_of(config, {})
        write_data(file, shift, seed)
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = run_federation(config, SITES)

    slow = f"site-{slow_site(seed)}"
    if way != "synchronous":
        assert outcome.rows[0]["missing"] == [slow]
    final = outcome.rows[-1]
    of_slow = final["clients"][slow]
    figures = {}
    for kind, accuracy in final["accuracy"].items():
        nines = of_slow["metrics"][f"{kind}/recall/{RARE}"]
        shares = (accuracy["mean"], of_slow["accuracy"][kind], nines)
        figures[kind] = [100 * share for share in shares]
    return figures


def table(results: Iterable[dict[str, Any]], grace: int) -> str:
    """Return means over the seeds: of all sites, in brackets of the slow one, and of the nines."""
    found: dict[tuple[str, ...], dict[str, list[list[float]]]] = {}
    for one in results:
        if one["grace"] not in (grace, 0):
            continue
        for kind, figures in one["figures"].items():
            row = found.setdefault((one["algo"], one["shift"], kind), {})
            row.setdefault(one["way"], []).append(figures)

    rows = []
    for what, by_way in sorted(found.items()):
        accuracies = []
        recalls = []
        for way in WAYS:
            figures = by_way.get(way, [])
            if not figures:
                accuracies.append("–")
                recalls.append("–")
                continue
            of_all, of_slow, of_nines = zip(*figures, strict=True)
            accuracies.append(f"{of_seeds(of_all)} ({statistics.fmean(of_slow):.1f})")
            recalls.append(of_seeds(of_nines))
        rows.append([*what, *accuracies, *recalls])
    nines = [f"nines, {way}" for way in WAYS]
    return markdown(("", "shift", "by", *WAYS, *nines), rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("slow-site"))
    parser.add_argument("--algos", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--grace", type=int, default=GRACE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "results.jsonl"
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []

    for seed, algo, shift, way in itertools.product(options.seeds, options.algos, SHIFTS, WAYS):
        what = {"shift": shift, "algo": algo, "way": way, "seed": seed}
        what["grace"] = 0 if way == "synchronous" else options.grace
        if any(what.items() <= one.items() for one in done):
            continue
        try:
            figures = tried(shift, algo, way, options.grace, seed)
        except SettingsError as error:
            print(error, flush=True)
            figures = {}
        done.append({**what, "figures": figures})
        with kept.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(json.dumps(done[-1]), flush=True)
    print(table(done, options.grace))


if __name__ == "__main__":
    main()
