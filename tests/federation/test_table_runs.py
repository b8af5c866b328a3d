"""A table over real runs (in this process, without Flower's processes): the figures stand where they are looked for."""

import csv
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from protofl_common.tools.cli.compare import comparison
from protofl_common.tools.cli.table import execute
from protofl_common.tools.tables.execute import Runs
from protofl_common.tools.tables.plan import Run, plan, runs_of
from protofl_common.tools.tables.spec import read_table
from tests.support.harness import run_config, run_federation

TABLE = """
title: Real
recipe: fedplvm-office10
seeds: [1]
settings: {dataset: digit-domains, rounds: 2, evaluate-every: 1, models: mnist-cnn, image-size: 28, train-samples: 20,
           test-samples: 20, feature-dim: 16, local-epochs: 1}
columns:
  photo: {figure: {domain: photo}}
  best: {figure: {when: best}}
  received: {figure: {what: prototypes-received}}
  sent: {figure: {what: prototypes-sent, when: last-2}}
  numbers: {figure: {what: numbers}}
rows:
  FedPLVM: {settings: {algo: fedplvm}}
  Average: {settings: {algo: fedavg}}
"""


def in_this_process(run: Run, folder: Path, resume: bool, on_round: Callable[[int], None]) -> str:
    """Instead of Flower's processes."""
    here = {"run-name": run.name, "resume": resume, "threads": 1}
    kept = {key: value for key, value in run_config(folder).items() if key in ("cache-dir", "join-timeout")}
    alone = folder / "alone"  # the harness wants to find one run only
    alone.mkdir(parents=True, exist_ok=True)
    if resume:
        (folder / run.name).rename(alone / run.name)
    run_federation(run_config(folder) | run.config | kept | here | {"out-dir": str(alone)}, clients=5)
    (alone / run.name).rename(folder / run.name)
    return ""


def test_a_table_over_real_runs_and_one_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(TABLE, encoding="utf-8")
    table = read_table(tmp_path / "real.yaml")
    cells, runs = plan(table), Runs(tmp_path / "runs", keep_models=True)
    for cell in cells:
        for run in cell.runs.values():
            run.federation["num-supernodes"] = 5

    def all_of_them() -> int:
        return execute([(table, cells)], runs, in_this_process, tmp_path, {}, Console(quiet=True))

    assert all_of_them() == 0
    result = (tmp_path / "real.csv").read_text(encoding="utf-8")
    lines = {(line["row"], line["column"]): line for line in csv.DictReader(result.splitlines())}
    for column in ("photo", "best"):
        assert 0 <= float(lines["FedPLVM", column]["mean"]) <= 100
    assert float(lines["FedPLVM", "received"]["mean"]) >= 10
    assert float(lines["FedPLVM", "sent"]["mean"]) >= 10
    assert float(lines["FedPLVM", "numbers"]["mean"]) > float(lines["Average", "numbers"]["mean"]) > 10_000
    assert lines["Average", "sent"]["reason"] == "the algorithm reports no local-prototypes"

    first = runs.folder_of(runs_of(cells)[0])
    comparison([first, runs.folder_of(runs_of(cells)[1])])
    (first / "summary.json").unlink()
    assert not runs.finished(runs_of(cells)[0])
    assert all_of_them() == 0
    assert (tmp_path / "real.csv").read_text(encoding="utf-8") == result
