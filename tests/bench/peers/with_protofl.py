"""The job in ProtoFL, on the engine of `protofl run` in one process of one thread."""

import re
import sys

from job import Clock, arguments  # type: ignore[import-not-found]

from protofl_common.experiment.settings import default_run_config
from protofl_common.runs.folder import RunFolder
from protofl_common.simulation.grid import simulate

job, _, folder = arguments()
clock = Clock()


def line(text: str) -> None:
    if re.match(r"round +\d+/", text):
        clock.tick()


settings = {
    "algo": "fedavg",
    "dataset": "arrays",
    "data-dir": sys.argv[2],
    "partition": "natural",
    "test-from": "official-own",
    "participation": job.asked / job.users,
    "rounds": job.rounds,
    "evaluate-every": job.rounds + 1,
    "arch": "mnist-cnn",
    "feature-dim": 50,
    "batch-size": job.batch,
    "lr": job.lr,
    "momentum": 0.0,
    "device": "cpu",
    "out-dir": folder,
    "report": False,
}
run = simulate(dict(default_run_config()) | settings, job.users, line)
# The clients introduce themselves before round 1: left out, as other engines' start.
clock.times = clock.times[1:]
clock.report(RunFolder(run).finished_summary()["accuracy"]["head"]["weighted"])
