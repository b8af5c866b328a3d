"""``make bench-peers DATA_DIR=…``: one federated job in several engines, in turn.

    python -m tests.bench.peers.compare --data-dir D [--engines bare protofl pfl flower blazefl]
        [--repeat 3] [--rounds 20]

Each is one process of one thread. Each engine other than ours gets a virtual environment of its own
with the released package, in ``--environments``. BlazeFL needs a ``python3.12`` on the path, and is
left out where there is none.

``many``: 1,000 users of 50 images, 50 asked, batches of 10 (pfl-research's own benchmark, on
Fashion-MNIST). ``all``: 100 users of 500 images, all asked, batches of 50. Prints milliseconds per
visit, the ratio to the bare loop, accuracy, and memory, without the first two rounds. Engines draw
differently. Nothing here passes or fails.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from protofl_common.config.sections import DataSettings
from protofl_common.data.store import open_data
from protofl_common.experiment.settings import Settings, default_run_config
from tests.bench.peers.job import Job
from tests.bench.printing import parser_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
PACKAGES = {
    "pfl": ["pfl[pytorch]==0.6.*"],
    "flower": ["flwr[simulation]==1.42.*", "torch"],
    "blazefl": ["blazefl[contrib,reproducibility]==2.0.*"],
}
PYTHONS = {"blazefl": "python3.12"}
"""The interpreter of an engine that cannot run on ours."""
JOBS = {
    "many": Job(users=1000, images=50, asked=50, rounds=20),
    "all": Job(100, 500, 100, rounds=7, batch=50),
}
WARM_UP = 2
"""Rounds that do not count."""


def dealt(settings: DataSettings, job: Job, file: Path) -> None:
    """Write the job's images as a file that all engines read.

    It has as many images of each user as the job says, and the official test images, dealt to all.
    """
    data = open_data(settings)
    draw = np.random.default_rng(0)
    official = np.asarray(data.official)
    train = draw.permutation(np.flatnonzero(official == 0))[: job.users * job.images]
    test = draw.permutation(np.flatnonzero(official == 1))
    rows = np.concatenate([train, test])
    users = [f"user-{row % job.users:05d}" for part in (train, test) for row in range(len(part))]
    split = ["train"] * len(train) + ["test"] * len(test)
    np.savez(
        file,
        inputs=data.inputs[rows],
        labels=data.labels[rows],
        client=np.array(users),
        split=np.array(split),
    )


def interpreter(engine: str, environments: Path) -> str:
    """Return the Python of an engine's environment, made where it is missing."""
    if engine not in PACKAGES:
        return sys.executable
    folder = environments / engine
    python = str(folder / "bin" / "python")
    if not folder.is_dir():
        base = PYTHONS.get(engine, sys.executable)
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[engine]], check=True)
    return python


def can_run(engine: str) -> bool:
    """Return whether the Python that an engine needs is there; say so where it is not."""
    needed = PYTHONS.get(engine, sys.executable)
    if shutil.which(needed):
        return True
    print(f"{engine} is left out: it needs {needed}, which is not on the path")
    return False


def timed(engine: str, python: str, job: Job, file: Path) -> dict[str, Any]:
    """Run an engine once; return its median seconds a round, its accuracy and megabytes."""
    script = HERE / ("bare.py" if engine == "bare" else f"with_{engine}.py")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with TemporaryDirectory() as home:
        private = {
            "HOME": home,
            "FLWR_HOME": home,
            "FLWR_TELEMETRY_ENABLED": "0",
            "PYTHONPATH": f"{HERE}:{REPOSITORY}",
        }
        command = [python, str(script), json.dumps(asdict(job)), str(file), home]
        done = subprocess.run(
            command, env=os.environ | threads | private, capture_output=True, text=True, cwd=home
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{engine} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result | {"seconds": statistics.median(result["seconds"][WARM_UP:])}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--engines", nargs="+", default=["bare", "protofl", *PACKAGES])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="instead of the job's own number")
    parser.add_argument("--environments", type=Path, default=Path("bench-peers"))
    options = parser.parse_args()
    pythons = {
        engine: interpreter(engine, options.environments.absolute())
        for engine in options.engines
        if can_run(engine)
    }
    config = default_run_config() | {"dataset": options.dataset, "data-dir": options.data_dir}
    settings = Settings.from_run_config(config, {}).data
    for name in options.jobs:
        job = replace(JOBS[name], rounds=options.rounds or JOBS[name].rounds)
        runs = []
        with TemporaryDirectory() as folder:
            file = Path(folder, "job.npz")
            dealt(settings, job, file)
            for _ in range(options.repeat):
                runs.append({each: timed(each, pythons[each], job, file) for each in pythons})
        titles = f"{'engine':10} {'ms a visit':>10} {'x bare':>7} {'accuracy':>9} {'MB':>6}"
        print(f"\n{name}: {job}\n{titles}")
        for engine in pythons:
            visit = statistics.median(run[engine]["seconds"] for run in runs) / job.asked * 1000
            slowdown = 0.0
            if "bare" in pythons:
                slowdown = statistics.median(
                    run[engine]["seconds"] / run["bare"]["seconds"] for run in runs
                )
            accuracy = 100 * statistics.mean(run[engine]["accuracy"] for run in runs)
            memory = max(run[engine]["megabytes"] for run in runs)
            print(f"{engine:10} {visit:10.1f} {slowdown:7.2f} {accuracy:9.1f} {memory:6.0f}")


if __name__ == "__main__":
    main()
