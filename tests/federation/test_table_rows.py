"""Every row and every column of every table takes two rounds, on stand-ins for the data sets that are files.

A table's first row runs in all columns, its other rows in the first. Clients are two and have a few samples, images are
small and random, and weights of ImageNet are an embedded backbone's; all else is as the table says. Where the paper has
no number, clients whose heads differ may be refused.
"""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl_common.config.sections import DataSettings
from protofl_common.data.raw import RawData
from protofl_common.data.sources import SOURCES, Source
from protofl_common.experiment.settings import default_run_config
from protofl_common.tools.cli.arguments import ROOT
from protofl_common.tools.tables.figure import NoFigure
from protofl_common.tools.tables.plan import Cell, Run, plan
from protofl_common.tools.tables.spec import TableFile, read_table
from tests.support.given import Patch
from tests.support.harness import run_federation

TABLES = sorted((ROOT / "configs" / "tables").glob("*.yaml"))
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "arrays": (12, 25), "text-csv": (64,)}
"""Of one sample; (3, 32, 32) where none stands."""
CLASSES = {"arrays": 9, "text-csv": 4, "image-folder": 200, "domain-folder": 10}
DOMAINS = {"digit5": "abcde", "office10": "abcd", "domainnet": "abcdef"}
"""By the folder of the data."""
SMALL = {
    "rounds": 2,
    "evaluate-every": 2,
    "total-samples": 0,
    "train-samples": 8,
    "test-samples": 8,
    "batch-size": 4,
}
LARGEST = {"local-epochs": 1, "shots": 4, "image-size": 32, "lr": 0.001}
"""FedPLVM's λ = 100 lets the features of noise grow beyond what the server takes, at its own learning rate."""
MADE: set[str] = set()
"""Names of the runs of the tables before."""


def stand_in(dataset: str, settings: DataSettings) -> RawData:
    """Random samples, 20 of each class, or 6 of 100 classes or more, in every domain."""
    source = SOURCES[dataset]
    named = tuple(settings.classes.split(",")) if settings.classes else ()
    count = len(named) or source.num_classes or CLASSES[dataset]
    domains = source.domains or tuple(DOMAINS.get(Path(settings.data_dir).name, ""))
    each = 20 if count < 100 else 6
    domain, label, number = (a.ravel() for a in np.indices((len(domains) or 1, count, each)))
    random, shape = np.random.default_rng(0), (len(label), *SHAPES.get(dataset, (3, 32, 32)))
    inputs: Any = random.integers(0, 256, shape)
    inputs = inputs.astype({"arrays": np.float32, "text-csv": np.int64}.get(dataset, np.uint8))
    official = ((number % 4 == 0) & source.has_official).astype(np.uint8)
    return RawData(inputs, label, domain, official, named or tuple(map(str, range(count))), domains)


@pytest.fixture
def _data(monkeypatch: Patch) -> None:
    for name, source in SOURCES.items():
        if source.locate is not Source.locate:
            monkeypatch.setitem(
                SOURCES, name, replace(source, locate=Source.locate, read=partial(stand_in, name))
            )


def of_runs(table: TableFile) -> Iterator[tuple[Run, list[Cell]]]:
    """The runs of the first row and of the first column, each with its cells."""
    cells, runs = defaultdict[str, list[Cell]](list), dict[str, Run]()
    every = plan(table, seeds=(1,))
    for cell in every:
        run = cell.runs[1]
        cells[run.name].append(cell)
        if cell.row == every[0].row or cell.column == every[0].column:
            runs[run.name] = run
    return ((run, cells[name]) for name, run in runs.items() if name not in MADE)


def small(run: Run, folder: Path, cache: Path) -> tuple[dict[str, Any], int]:
    """The run's config, made small, and its number of clients."""
    config = default_run_config() | run.config | SMALL
    config |= {key: min(config[key], most) for key, most in LARGEST.items()}
    config["positive-rate"] = max(
        config["positive-rate"], 0.5
    )  # batch normalisation needs more than one sample
    config |= {"backbones": "glyphs"} if ":" in config["backbones"] else {}
    here = {
        "out-dir": str(folder),
        "cache-dir": str(cache / config["data-dir"]),
        "report": False,
        "threads": 1,
    }
    counts = config["clients-per-domain"]
    return config | here, sum(map(int, counts.split(","))) if counts else 2


def problem_of(run: Run, cells: list[Cell], folder: Path, cache: Path) -> str:
    """What is wrong with the run, or with what its cells read of it; "" where nothing is."""
    try:
        outcome = run_federation(*small(run, folder, cache))
        found, missing = [], ""
        for cell in cells:
            try:
                found.append(replace(cell.figure, domain="").read(outcome.folder))
            except NoFigure as none:
                missing = str(none)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the models of all runs are many gigabytes
    lost = [
        reason
        for row in outcome.rows
        for kind in ("failed", "refused")
        for reason in row[kind].values()
    ]
    return lost[0] if lost else "" if found else missing


@pytest.mark.long
@pytest.mark.usefixtures("_data")
@pytest.mark.parametrize("path", TABLES, ids=[path.stem for path in TABLES])
def test_every_row_and_every_column_runs(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    problems, cache = {}, tmp_path_factory.getbasetemp() / "cache"
    table = read_table(path)
    for number, (run, cells) in enumerate(of_runs(table)):
        MADE.add(run.name)
        problem = problem_of(run, cells, tmp_path / str(number), cache)
        without_number = not any(cell.column in table.rows[cell.row].paper for cell in cells)
        if problem and not (without_number and "the sites differ in weights" in problem):
            problems[f"{cells[0].row} / {cells[0].column}"] = problem
    assert problems == {}
