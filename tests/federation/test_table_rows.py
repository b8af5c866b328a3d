"""Every row and every column of every table takes two rounds, on stand-ins for data in files.

A table's first row runs in all columns, its other rows in the first. Clients are two and have a few
samples, images are small and random, and weights of ImageNet are an embedded backbone's; all else
is as the table says. Where the paper has no number, clients whose heads differ may be refused.
"""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from protofl_common.config.datasets import DATASETS
from protofl_common.data.raw import RawData
from protofl_common.data.sources import SOURCES, Source
from protofl_common.experiment.settings import default_run_config
from protofl_common.tools.arguments import ROOT
from protofl_common.tools.tables.figure import NoFigure
from protofl_common.tools.tables.plan import plan
from protofl_common.tools.tables.spec import read_table
from tests.support.harness import run_federation

TABLES = sorted((ROOT / "configs" / "tables").glob("*.yaml"))
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "arrays": (12, 25), "text-csv": (64,)}
"""Of one sample; (3, 32, 32) where none stands."""
IMAGES = ("mnist-m.npz",)
"""Files of arrays that are images; the others are taken for series."""
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
"""A setting of a table is reduced to this.

At its own learning rate, FedPLVM's λ = 100 lets features of noise grow beyond what is taken.
"""
MADE = set()
"""Names of runs that have been made for an earlier table: they are not made again."""


def stand_in(dataset, settings):
    """Return random samples in place of a data set in files, with its classes and domains.

    In every domain there are 20 samples of each class, or 6 where there are 100 classes or more.
    """
    source = SOURCES[dataset]
    classes = settings.classes.split(",") if settings.classes else []
    if not classes:
        classes = [str(label) for label in range(DATASETS[dataset].num_classes or CLASSES[dataset])]
    domains = source.domains or tuple(DOMAINS.get(Path(settings.data_dir).name, ""))
    samples_per_class = 20 if len(classes) < 100 else 6

    indices = np.indices((len(domains) or 1, len(classes), samples_per_class))
    domain, label, number = (axis.ravel() for axis in indices)
    kind = "images" if Path(settings.data_dir).name in IMAGES else dataset
    shape = (len(label), *SHAPES.get(kind, (3, 32, 32)))
    inputs = np.random.default_rng(0).integers(0, 256, shape)
    dtype = {"arrays": np.float32, "text-csv": np.int64}.get(kind, np.uint8)
    official = np.zeros(len(label), np.uint8)
    if DATASETS[dataset].has_official:  # a quarter of the samples is the official test part
        official[number % 4 == 0] = 1
    return RawData(inputs.astype(dtype), label, domain, official, tuple(classes), domains)


@pytest.fixture
def _data(monkeypatch):
    """Put `stand_in` in the place of all data sets that are read from files."""
    for name, source in SOURCES.items():
        if source.locate is not Source.locate:
            random = replace(source, locate=Source.locate, read=partial(stand_in, name))
            monkeypatch.setitem(SOURCES, name, random)


def runs_of(table):
    """Return the runs of a table's first row and first column, each with the cells that it fills.

    Runs that an earlier table has had are left out.
    """
    seed = 1
    cells = plan(table, seeds=(seed,))
    first, *_others = cells
    cells_of_run = {}
    runs = {}
    for cell in cells:
        run = cell.runs[seed]
        cells_of_run.setdefault(run.name, []).append(cell)
        if cell.row == first.row or cell.column == first.column:
            runs[run.name] = run
    return [(run, cells_of_run[name]) for name, run in runs.items() if name not in MADE]


def small(run, folder, cache):
    """Return the settings of a run, made small, and its number of clients."""
    config = default_run_config() | run.config | SMALL
    for key, largest in LARGEST.items():
        config[key] = min(config[key], largest)
    # batch normalisation needs more than one sample
    config["positive-rate"] = max(config["positive-rate"], 0.5)
    if ":" in config["backbones"]:
        config["backbones"] = "glyphs"
    config["out-dir"] = str(folder)
    config["cache-dir"] = str(cache / config["data-dir"])
    config["report"] = False
    config["threads"] = 1
    counts = config["clients-per-domain"]
    clients = sum(map(int, counts.split(","))) if counts else 2
    return config, clients


def problem_of(run, cells, folder, cache):
    """Make a run; return what is wrong with it, or with what its cells read of it, or "".

    A cell whose figure the run lacks is no problem if another cell finds its own.
    """
    config, clients = small(run, folder, cache)
    try:
        outcome = run_federation(config, clients=clients)
        missing = [figure_missing(cell, outcome.folder) for cell in cells]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the models of all runs are many gigabytes

    for row in outcome.rows:
        for reason in (*row["failed"].values(), *row["refused"].values()):
            return str(reason)
    if all(missing):
        return missing[-1]
    return ""


def figure_missing(cell, run):
    """Return why a cell finds no figure in a run, or "" if it finds one."""
    try:
        replace(cell.figure, domain="").read(run)  # two clients do not have all domains
    except NoFigure as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.usefixtures("_data")
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_row_and_every_column_runs(path, tmp_path, tmp_path_factory):
    """No run fails or loses a reply; unlike heads may be refused where the paper has no number."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    table = read_table(path)
    problems = {}
    for number, (run, cells) in enumerate(runs_of(table)):
        MADE.add(run.name)
        problem = problem_of(run, cells, tmp_path / str(number), cache)
        in_paper = any(cell.column in table.rows[cell.row].paper for cell in cells)
        has_unlike_heads = "the sites differ in weights" in problem
        if has_unlike_heads and not in_paper:
            continue
        if problem:
            problems[f"{cells[0].row} / {cells[0].column}"] = problem

    assert problems == {}
