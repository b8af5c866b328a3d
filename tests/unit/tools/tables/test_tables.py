"""Tables: their files, what runs and is not repeated, how the result looks, and its figures."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from protofl_common.config.datasets import PARTITIONS
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allowing
from protofl_common.experiment.settings import Settings, default_run_config, to_run_config
from protofl_common.runs.events import Failed, RoundDone, Said
from protofl_common.simulation import grid, machine
from protofl_common.tools.arguments import RECIPES, ROOT
from protofl_common.tools.cli import main
from protofl_common.tools.cli.table import draw, execute, start_engine
from protofl_common.tools.tables import render
from protofl_common.tools.tables.figure import Figure, NoFigure
from protofl_common.tools.tables.plan import (
    REMOVABLE,
    Run,
    Runs,
    launch,
    own_files,
    plan,
    runs_of,
)
from protofl_common.tools.tables.spec import read_table
from tests.support import launches
from tests.support.commands import output
from tests.support.fakes import row as round_row
from tests.support.fakes import write_run
from tests.support.launches import none

TABLES = sorted((ROOT / "configs" / "tables").glob("*.yaml"))
SMALL = """
title: A small table
source: Somebody et al., Table 1
note: |
  A note.
recipe: fedproto-mnist-3way
seeds: [1, 2]
figure: {when: final, what: head}
settings: {dataset: digits, test-from: split, rounds: 2, partition: iid}
columns:
  all:
  first: {figure: {domain: a}}
  few: {settings: {train-samples: 10}, clients: 3}
rows:
  Local: {settings: {algo: local}, paper: [98.26 ± 0.40, null, 90]}
  FedRep: {paper: [97.5]}
  FedProto: {settings: {algo: fedproto, fedproto.lambda: 0.5}}
  gain: {paper: {few: 1.5}}
  MNIST: {settings: {dataset: mnist, partition: iid, data-dir: data/no}}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def edit(path, old, new):
    """Write the small table with one part of it replaced."""
    assert old in SMALL
    path.write_text(SMALL.replace(old, new))


def planned(path, **chosen):
    return plan(read_table(path), **chosen)


def names_of_runs(path, **overrides):
    return [run.name for run in runs_of(planned(path, overrides=overrides))]


def result(table, suffix):
    return table.with_suffix(suffix).read_text()


def second_of_fedproto(run):
    return run.name.startswith("fedproto-digits-s2")


class Launcher(launches.Launcher):
    """Stands for making runs: it writes what a run would leave.

    Runs of ``fedproto`` are better, and unless told otherwise that with seed 2 fails.
    """

    lost: tuple[str, ...] = ()  # warnings of lost replies, of all runs of ``fedproto``
    models = False

    def __init__(self, broken=second_of_fedproto, **changes):
        super().__init__(broken, **changes)

    def finish(self, run, folder):
        if self.models:
            (folder / "clients/site-0").mkdir(parents=True)
            (folder / "checkpoints").mkdir()
        is_local = run.settings.run.algo == "local"
        accuracy = (0.5 if is_local else 0.75) + 0.01 * run.settings.run.seed
        clients = int(run.federation["num-supernodes"])
        sites = {str(site): {"head": accuracy} for site in range(clients)}
        domains = dict.fromkeys(sites, "a")
        warnings = () if is_local else self.lost
        write_run(folder, to_run_config(run.settings), [sites] * 3, domains, warnings=warnings)


def run_table(path, launcher, printed=None, **chosen):
    """Make a table, and print to a console of 200 columns that is no terminal."""
    table = read_table(path)
    console = Console(file=printed, width=200, quiet=printed is None)
    runs = Runs(path.parent / "runs")
    return execute([(table, plan(table, **chosen))], runs, launcher, path.parent, console)


@pytest.mark.slow
# -- what runs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", TABLES, ids=[path.stem for path in TABLES])
def test_every_cell_has_right_settings_and_a_column_the_same_clients(path, monkeypatch):
    """Data set, division and what is tested are of the column, unless a row sets them itself.

    So it must be, however many recipes a table has.
    """
    monkeypatch.setattr("protofl_common.tools.tables.plan.check_data_are_here", lambda data: None)
    table = read_table(path)
    cells = plan(table, seeds=(1,))

    assert {cell.column for cell in cells} == set(table.columns)

    has_papers_numbers = any(row.paper for row in table.rows.values())
    assert has_papers_numbers == ("no paper's" not in table.source)
    for name, row in table.rows.items():
        assert row.runs, f"{name}: nothing runs; the catalog has it"
        assert "algo" in table.settings | row.settings

    first_of_column = {}
    for cell in cells:
        run = cell.runs[1]
        data = asdict(run.settings.data) | {"clients": run.federation["num-supernodes"]}
        first = first_of_column.setdefault(cell.column, data)
        rows_own = {key.replace("-", "_") for key in table.rows[cell.row].settings}
        differ = {key for key in data if data[key] != first[key]} - rows_own
        assert not differ, f"{cell.row} in {cell.column}"
        if path.stem == "fedpcl-table6" and "label" in data["partition"]:
            assert data["test_from"] == "balanced"


@pytest.mark.parametrize("path", [path for path in TABLES if path.stem.startswith("fedtgp")],
    ids=lambda path: path.stem)  # fmt: skip
def test_fedkd_in_the_tables_of_fedtgp_has_the_settings_of_its_appendix_a(path, monkeypatch):
    """T_end is 0.95, and the student a group's smallest network, else its first."""
    monkeypatch.setattr("protofl_common.tools.tables.plan.check_data_are_here", lambda data: None)
    for run in runs_of(planned(path, seeds=(1,))):
        config = to_run_config(run.settings)
        if config["algo"] != "fedkd":
            continue
        has_smaller_one = config["models"].startswith(("resnet", "htcnn8"))
        assert config["fedkd.energy-end"] == 0.95
        assert config["fedkd.student"] == ("cnn4" if has_smaller_one else "")


def test_every_recipe_stands_in_a_table():
    text = "".join(path.read_text() for path in TABLES)
    assert [path.stem for path in RECIPES.glob("*.toml") if path.stem not in text] == []


def test_a_run_is_known_by_its_settings_wherever_it_stands_in_the_table(small):
    """A setting that is given its default value makes no other run, and another value does.

    Of three rows and three columns with two seeds, two columns share their runs; MNIST has no data.
    """
    cells = planned(small)
    by_place = {(cell.row, cell.column): cell for cell in cells}

    local_runs = by_place["Local", "all"].runs
    assert set(local_runs) == {1, 2}
    assert local_runs[1].name == by_place["Local", "first"].runs[1].name

    few = by_place["FedProto", "few"].runs[2]
    assert few.federation == {"num-supernodes": 3, "client-resources-num-cpus": 1}
    assert few.config["train-samples"] == 10
    assert few.config["seed"] == 2
    assert few.config["fedproto.lambda"] == 0.5

    assert "data-dir = 'data/no'" in by_place["MNIST", "all"].skipped

    names = [run.name for run in runs_of(cells)]
    assert len(names) == 8
    # the recipe's momentum; threads are the machine's, and change no result
    assert names_of_runs(small, momentum=0.5, threads=1) == names
    assert names_of_runs(small, momentum=0.9) != names


def test_a_row_needs_no_settings_and_a_table_no_recipe(small):
    """Settings that are not given have the defaults; a number that YAML takes for a text is one."""
    defaults = default_run_config()

    edit(small, "  FedRep:", "  as it is:\n  FedRep:")
    runs = runs_of(planned(small, only=("as it is",)))

    assert {run.settings.run.algo for run in runs} == {defaults["algo"]}

    edit(small, "recipe: fedproto-mnist-3way\n", "")
    run = planned(small)[0].runs[1]

    assert run.federation["num-supernodes"] == 10
    assert run.settings.training.lr == defaults["lr"]

    edit(small, "rounds: 2,", "rounds: 2, lr: 1e-3,")  # a text to YAML
    assert {run.settings.training.lr for run in runs_of(planned(small))} == {0.001}


def test_the_data_folder_takes_the_place_of_the_recipes(tmp_path):
    """``data_dir`` holds the recipe's folder under its name; another path makes another run."""
    table = ROOT / "configs" / "tables" / "fedplvm-office10.yaml"
    data = tmp_path / "office10"
    (data / "amazon" / "mug").mkdir(parents=True)

    run = planned(table, data_dir=str(tmp_path))[0].runs[1]
    assert run.config["data-dir"] == str(data)
    assert planned(table, data_dir=str(tmp_path / "elsewhere"))[0].skipped

    subset = tmp_path / "subset"
    subset.mkdir()
    data.rename(subset / "office10")

    assert planned(table, data_dir=str(subset))[0].runs[1].name != run.name


@pytest.mark.parametrize("key", ["arch", "dataset"])
def test_edited_code_of_ones_own_makes_another_run(key, small, tmp_path, monkeypatch):
    """Settings have the name of code only: a run of the old code would pass for one of the new."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "edited_nets"
    package.mkdir()
    (package / "__init__.py").write_text("from torch import nn\n")
    (package / "layers.py").write_text("class Net: ...\n")

    def names():
        for module in list(sys.modules):
            if module.startswith("edited_nets"):
                del sys.modules[module]  # as in a new process
        with allowing(["edited_nets"]):
            overrides = {key: "edited_nets.layers:Net", "partition": "iid"}
            return set(names_of_runs(small, **overrides))

    before = names()
    assert names() == before

    (package / "layers.py").write_text("class Net: 1\n")
    assert len(names() - before) == len(before) > 0


@pytest.mark.parametrize("dataset", ["arrays", "manifest", "json:load"])
def test_edited_data_or_division_are_another_run(dataset, small, tmp_path, monkeypatch):
    """A line more in the file, and another version of the partition, change the runs' names."""
    file = tmp_path / "patients.csv"
    file.write_text("age,label\n1,ill\n2,well\n")

    def names():
        own_files.cache_clear()  # a process reads them once
        with allowing(["json"]):
            overrides = {"dataset": dataset, "data-dir": str(file), "partition": "iid"}
            return set(names_of_runs(small, **overrides))

    before = names()
    assert names() == before

    file.write_text("age,label\n1,ill\n2,well\n3,well\n")
    after = names()

    assert len(after - before) == len(before) > 0

    monkeypatch.setitem(PARTITIONS, "iid", replace(PARTITIONS["iid"], version=2))
    assert not names() & after


# -- what is not repeated -------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_finished_runs_stay_interrupted_ones_go_on_failed_ones_begin_anew(damaged, small):
    """``damaged``: the interrupted run cannot go on, and begins anew as well.

    The two runs of ``fedproto`` with seed 2, of which the columns `all` and `first` share one, fail
    until they are repaired.
    """
    interrupted = Launcher(interrupt_at=4)
    with pytest.raises(KeyboardInterrupt):
        run_table(small, interrupted)

    *finished, stopped = interrupted.launched
    assert len(finished) == 3
    assert "| Local | 51.50 ± 0.71 | 98.26 ± 0.40 |" in result(small, ".md")

    goes_on = Launcher(damaged=damaged)
    assert run_table(small, goes_on) == 1
    assert goes_on.resumed == [stopped]

    begins = [stopped, stopped] if damaged else [stopped]  # a damaged one begins anew
    assert goes_on.launched[: len(begins)] == begins
    assert not set(goes_on.launched) & set(finished)

    repaired = Launcher(broken=none)
    assert run_table(small, repaired) == 0
    without_digest = [name.rpartition("-")[0] for name in repaired.launched]
    assert without_digest == ["fedproto-digits-s2"] * 2

    done = Launcher()
    assert run_table(small, done) == 0
    assert done.launched == []


@pytest.mark.parametrize("keep", [False, True])
def test_a_finished_run_keeps_its_models_only_on_request(keep, small):
    """What may be removed are the folders of models and of checkpoints."""
    run = runs_of(planned(small, seeds=(2,), only=("Local",)))[0]
    runs = Runs(small.parent / "runs", keep)

    runs.execute(run, Launcher(models=True), lambda number: None)

    assert not runs.failed

    left = {path.name for path in runs.folder_of(run).iterdir()}
    assert left & set(REMOVABLE) == (set(REMOVABLE) if keep else set())


def test_a_run_that_another_process_makes_is_left_to_it(small):
    """Its lock is taken, and its cell in the table is open."""
    chosen = {"seeds": (1,), "only": ("Local",)}
    # the run of the columns all and first, and that of the column few
    other, mine = runs_of(planned(small, **chosen))
    launcher = Launcher()
    printed = StringIO()

    with Runs(small.parent / "runs").lock(other.name):
        assert run_table(small, launcher, printed, **chosen) == 0

    assert launcher.launched == [mine.name]

    lines = printed.getvalue().splitlines()
    assert f"  another process makes {other.name}" in lines
    assert f"  {mine.name}: round 1/2" in lines
    assert f"  done: {mine.name}" in lines
    assert "| Local | … | 98.26 ± 0.40 |" in result(small, ".md")


def test_shards_are_all_runs_and_share_none(small):
    """Three shards take every third run each."""
    table = read_table(small)
    cells = plan(table)
    launched = []
    for number in range(3):
        launcher = Launcher()
        out = small.parent / str(number)
        shard = slice(number, None, 3)
        console = Console(quiet=True)
        execute([(table, cells)], Runs(out / "runs"), launcher, out, console, shard=shard)
        launched += launcher.launched

    assert sorted(launched) == sorted(run.name for run in runs_of(cells))


def test_a_run_of_other_settings_in_the_same_place_is_repeated(small):
    """The device may differ; the learning rate and the number of clients may not."""
    run = runs_of(planned(small, only=("Local",)))[0]
    runs = Runs(small.parent / "runs")
    config = to_run_config(run.settings)

    def is_finished(clients=20, **changes):
        sites = {str(site): {"head": 0.5} for site in range(clients)}
        write_run(runs.folder_of(run), config | changes, [sites])
        return runs.finished(run)

    assert is_finished()
    assert is_finished(device="cuda")
    assert not is_finished(lr=0.5)
    assert not is_finished(clients=3)


# -- how the result looks -------------------------------------------------------------------------
def latex_lines(table, suffix):
    """Return the lines of a table in LaTeX, without the spaces that align columns."""
    return [" ".join(line.split()) for line in result(table, suffix).splitlines()]


def test_the_result_as_markdown_latex_and_csv(small):
    """One run of FedProto has failed, and the data of a row are missing."""
    assert run_table(small, Launcher()) == 1

    assert result(small, ".md") == MARKDOWN

    latex = latex_lines(small, ".tex")
    assert latex[:2] == ["% A note.", "% - FedProto (all, first, few): failed: seed 2: it exploded"]
    begin = latex.index(r"\begin{tabular}{lrrrrrr}")
    assert latex[begin + 1 : begin + 3] == [
        r"\toprule",
        r"& all & paper & first & paper & few & paper \\",
    ]

    ours = r"51.50 $\pm$ 0.71"
    assert latex[begin + 4] == rf"Local & {ours} & 98.26 $\pm$ 0.40 & {ours} & & {ours} & 90 \\"

    rows = result(small, ".csv").splitlines()
    assert rows[:3] == [
        "row,column,seed,figure,value,warnings", "Local,all,1,final head,51,",
        "Local,all,2,final head,52,",
    ]  # fmt: skip
    assert "FedProto,all,1,final head,76," in rows


MARKDOWN = """# A small table

Somebody et al., Table 1

A note.

|  | all | paper | first | paper | few | paper |
|---|---:|---:|---:|---:|---:|---:|
| Local | 51.50 ± 0.71 | 98.26 ± 0.40 | 51.50 ± 0.71 |  | 51.50 ± 0.71 | 90 |
| FedRep | – | 97.5 | – |  | – |  |
| FedProto | 76.00 (1 of 2 seeds, others failed) |  | 76.00 (1 of 2 seeds, others failed) |  \
| 76.00 (1 of 2 seeds, others failed) |  |
| gain | – |  | – |  | – | 1.5 |
| MNIST | – |  | – |  | – |  |

Ours, of test data unless it says otherwise: final head, final head of a; \
mean ± sample standard deviation over the seeds.

- FedProto (all, first, few): failed: seed 2: it exploded
- MNIST (all, first, few): skipped: data-dir = 'data/no': there is no such folder \
(dataset 'mnist'); name another, or set download = true

## What it costs

Means over the runs: bytes of arrays that all clients together sent and received, the seconds \
of the whole run on the machine that made it, and how many replies could not be used.

|  | column | rounds | up | down | seconds | seconds per round | lost replies |
|---|---|---:|---:|---:|---:|---:|---:|
| Local | all | 2 | 1.0 kB | 2.0 kB | 61.0 | 1.5 | 2 |
| Local | first | 2 | 1.0 kB | 2.0 kB | 61.0 | 1.5 | 2 |
| Local | few | 2 | 1.0 kB | 2.0 kB | 61.0 | 1.5 | 2 |
| FedProto | all | 2 | 1.0 kB | 2.0 kB | 61.0 | 1.5 | 2 |
| FedProto | first | 2 | 1.0 kB | 2.0 kB | 61.0 | 1.5 | 2 |
| FedProto | few | 2 | 1.0 kB | 2.0 kB | 61.0 | 1.5 | 2 |
"""


A_NUMBER_EACH = "must be a number for each column"


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("title: A small table", "", "title: missing"),
    ("rows:", "rows: {a: }\nrows:", "not YAML: 'rows' stands twice"),
    ("rows:", "rowz: 1\nrows:", "rowz: unknown key; did you mean rows?"),
    ("seeds: [1, 2]", "seeds: 3", "seeds = 3: must be a list of whole numbers"),
    ("fedproto.lambda", "fedproto.lamda",
        "row FedProto: settings: fedproto.lamda: unknown key"),
    ("clients: 3", "clients: 0", "column few: clients = 0: must be a whole number, at least 1"),
    ("{few: 1.5}", "{many: 1.5}",
        f"row gain: paper = {{'many': 1.5}}: {A_NUMBER_EACH}, [1.0, …], of all, first, few"),
    ("null, 90]", "null, 90, 91]",
        f"row Local: paper = ['98.26 ± 0.40', None, 90, 91]: {A_NUMBER_EACH}"),
    ("{paper: [97.5]}", "{paper: 97.5}",
        f"row FedRep: paper = 97.5: {A_NUMBER_EACH}"),
    ("{paper: [97.5]}", "fedrep", "row FedRep = 'fedrep': must be key: value pairs"),
    ("  all:\n", "  all: 5\n", "column all = 5: must be key: value pairs"),
    ("rounds: 2,", "rounds: 2, seed: 9,",
        "settings: seed: must not be there; list them under seeds"),
])  # fmt: skip
def test_a_wrong_table_is_refused(old, new, expected, small):
    edit(small, old, new)
    with pytest.raises(SettingsError) as error:
        read_table(small)
    assert f"small.yaml: {expected}" in str(error.value)


def test_a_table_in_another_encoding_is_refused(small):
    small.write_bytes(SMALL.encode("utf-16"))
    with pytest.raises(SettingsError, match=r"small\.yaml: not UTF-8"):
        read_table(small)


def test_a_setting_of_a_row_that_its_algorithm_does_not_read_is_named(small):
    """What the whole table shares may be another row's."""
    edit(small, "rounds: 2,", "rounds: 2, fedtgp.lambda: 1,")
    planned(small)

    edit(small, "algo: local}", "algo: local, fedproto.lambda: 2}")
    with pytest.raises(SettingsError) as error:
        planned(small)

    reason = "fedproto.lambda = 2: has no effect on local, which reads no settings of its own"
    assert str(error.value).splitlines() == [
        f"small: Local / {column}: {reason}" for column in ("all", "first", "few")
    ]


def test_a_run_that_measured_other_metrics_is_another_run(small):
    """Metrics change no result; but a run that is finished would have none that are added now."""
    without = names_of_runs(small)
    edit(small, "rounds: 2,", "rounds: 2, metrics: auc,")
    with_auc = names_of_runs(small)

    assert not set(without) & set(with_auc)

    edit(small, "rounds: 2,", "rounds: 2, report: false,")

    assert names_of_runs(small) == without


def test_a_figure_that_the_runs_do_not_measure_is_named(small):
    """Balanced accuracy is measured unasked where classes are uneven; new clients are no metric."""
    for measured in ("head/balanced-accuracy", "head/new-clients", "validation/head"):
        edit(small, "what: head}", f"what: {measured}}}")
        planned(small)

    edit(small, "what: head}", "what: validation/head/auc}")
    wanted = "figure.what = 'validation/head/auc': its runs do not measure auc; set metrics = 'auc'"
    with pytest.raises(SettingsError, match=wanted):
        planned(small)

    planned(small, overrides={"metrics": "auc"})


def test_a_setting_of_the_command_line_must_act_on_some_row(small):
    """``fedtgp.lambda`` acts on none until a row runs FedTGP."""
    overrides = {"lr": 0.1, "fedproto.lambda": 3.0, "fedtgp.lambda": 2.0}
    with pytest.raises(SettingsError) as error:
        planned(small, overrides=overrides)

    reads = "fedproto.lambda, fedproto.distance, fedproto.granularity, fedproto.weighting"
    algorithms = f"on local, which reads no settings of its own; on fedproto, which reads {reads}"

    assert str(error.value) == f"fedtgp.lambda = 2.0: has no effect {algorithms}"

    edit(small, "{dataset: mnist", "{algo: fedtgp, dataset: mnist")
    cells = planned(small, overrides=overrides)

    # the plan is made, although these cells lack their data
    assert any(cell.skipped for cell in cells)


def test_replies_that_failed_stand_below_the_table(small):
    """Both runs of FedProto have lost two replies; their cells are marked in LaTeX."""
    lost = "2 of 40 replies failed or were refused, the last: ValueError: mine"
    assert run_table(small, Launcher(none, lost=(lost,))) == 0

    notes = [line for line in result(small, ".md").splitlines() if line.startswith("- ")]
    assert len(notes) == 2
    assert notes[0] == f"- FedProto (all, first, few): warning: seed 1, 2: {lost}"

    marked = r"76.50 $\pm$ 0.71 $^\dagger$"
    latex = latex_lines(small, ".tex")
    assert any(line.startswith("FedProto & ") and marked in line for line in latex)
    assert f"% {notes[0]}" in latex
    assert f'FedProto,all,1,final head,76,"{lost}"' in result(small, ".csv").splitlines()


@pytest.mark.slow
def test_figures_have_a_method_for_each_row_with_runs(small, tmp_path):
    """Local and FedProto have runs, MNIST has no data."""
    run_table(small, Launcher())
    runs = Runs(tmp_path / "runs")
    cells = [cell for cell in planned(small) if cell.column == "all"]

    assert draw(read_table(small), cells, runs, tmp_path / "figures") == []

    names = {f"small-all-head-{name}" for name in ("curves", "boxes")}
    files = list((tmp_path / "figures").iterdir())
    assert {file.stem for file in files} == names
    assert {file.suffix for file in files} == {".svg", ".pdf"}
    svg = (tmp_path / "figures/small-all-head-curves.svg").read_text()
    assert "Local" in svg
    assert "FedProto" in svg
    assert "MNIST" not in svg


def test_figures_are_of_rows_and_columns_whose_means_they_show(small, tmp_path):
    """No run predicts by prototypes, and the figures of the other columns are no mean over all."""
    edit(small, "few: {", "few: {figure: {over: std}, ")
    text = small.read_text().replace("algo: local}", "algo: local}, PROTOTYPE")
    small.write_text(text.replace("PROTOTYPE", "figure: {what: prototype}"))
    run_table(small, Launcher())
    runs = Runs(tmp_path / "runs")

    not_drawn = draw(read_table(small), planned(small), runs, tmp_path / "figures")

    assert not_drawn == ["first", "few"]
    files = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert files == {"small-all-head-curves.svg", "small-all-head-boxes.svg"}


def test_runs_whose_last_evaluation_lacks_the_figure_are_in_no_drawing(small, tmp_path):
    """The cells have it, of earlier rounds; but the points of the boxes are of the last one."""
    edit(small, "when: final", "when: best")
    run_table(small, Launcher())
    runs = Runs(tmp_path / "runs")
    cells = {cell.row: cell for cell in planned(small) if cell.column == "all"}
    for run in cells["FedProto"].runs.values():
        path = runs.folder_of(run) / "metrics.jsonl"
        if not path.exists():  # the run has failed
            continue
        *lines, last = path.read_text().splitlines()
        unanswered = json.dumps(json.loads(last) | {"accuracy": {}, "clients": {}})
        path.write_text("\n".join([*lines, unanswered, ""]))

    draw(read_table(small), list(cells.values()), runs, tmp_path / "figures")

    svg = (tmp_path / "figures/small-all-head-curves.svg").read_text()
    assert "Local" in svg
    assert "FedProto" not in svg


def test_a_lead_that_may_be_chance_is_not_bold(small):
    """The best cell is 0, 1 and 5 points better than the other: p is 0.32."""
    edit(small, "seeds: [1, 2]", "seeds: [1, 2, 3]")
    table = read_table(small)
    leads = {1: 0.0, 2: 1.0, 3: 5.0}
    results = {}
    for cell in plan(table):
        if cell.runs and cell.column == "all":
            ours = cell.row == "FedProto"
            values = {seed: 50 + (lead if ours else 0) for seed, lead in leads.items()}
            results[cell.row, "all"] = render.Result(cell, values, "done", "", "final head")

    assert render.cells_of(table, results).bold == []

    # leads of 2.1, 2.2 and 2.3 points are no chance
    for seed in leads:
        results["FedProto", "all"].values[seed] = 52 + seed / 10
    ((_, column),) = render.cells_of(table, results).bold
    assert column == 1  # the column "all", after the names of the rows

    # the only run of a third row that did not fail is better still
    theirs = replace(results["Local", "all"], values={1: 90.0}, state="failed")
    results["MNIST", "all"] = theirs
    assert render.cells_of(table, results).bold == []


def test_the_best_of_finished_cells_is_bold_in_latex(small):
    """FedProto is better in both of its runs."""
    run_table(small, Launcher(none))

    latex = "\n".join(latex_lines(small, ".tex"))
    assert r"Local & 51.50 $\pm$ 0.71 & 98.26 $\pm$ 0.40 & " in latex

    best = r"\textbf{76.50 $\pm$ 0.71}"
    assert rf"FedProto & {best} & & {best} & & " in latex


@pytest.mark.parametrize("figure", ["{what: numbers}", "{over: std}"])
def test_nothing_is_bold_where_less_is_better(figure, small):
    """Numbers that are sent, and deviations, are better if they are small."""
    edit(small, "figure: {when: final, what: head}", f"figure: {figure}")
    without_domain = small.read_text().replace("{figure: {domain: a}}", "")
    small.write_text(without_domain)

    run_table(small, Launcher(none))

    assert "textbf" not in result(small, ".tex")


def test_differences_from_a_row_are_a_table_of_their_own(small):
    """The table key ``against`` names the row that all others are compared with."""
    small.write_text(f"{SMALL}against: FedProto\n")
    run_table(small, Launcher())
    of_local = r"2 (1 paired) & 51.50 & 45.15 \ldots{} 57.85 & $-$25.00 & -- & -- & -- \\"
    assert rf"Local & few & {of_local}" in latex_lines(small, ".against.tex")

    small.write_text(f"{SMALL}against: Local\n")
    run_table(small, Launcher(none))
    lines = latex_lines(small, ".against.tex")

    assert lines[0] == "% A note."
    head = r"& column & n & mean & 95 \% interval & difference & 95 \% interval & p & p (Holm) \\"
    assert lines[6] == head

    mean = r"2 & 76.50 & 70.15 \ldots{} 82.85"
    difference = r"+25.00 & 25.00 \ldots{} 25.00"
    difference += r" & \ensuremath{<} 0.001 & \ensuremath{<} 0.001"
    assert rf"FedProto & few & {mean} & {difference} \\" in lines


def test_rows_that_do_not_run_now_keep_their_results(small):
    """The second time only the row Local is asked for."""
    launcher = Launcher(none)
    run_table(small, launcher)
    before = result(small, ".md")

    run_table(small, launcher, only=("Local",))

    assert result(small, ".md") == before
    ours = next(line for line in before.splitlines() if line.startswith("| FedProto"))
    assert "–" not in ours.split("|")[2]


# -- the command ----------------------------------------------------------------------------------
def test_the_command_shows_what_would_run(small, capsys):
    """A plan names settings only where cells differ, here two of the column few."""
    edit(small, "train-samples: 10", "train-samples: 10, positive-rate: 0.5")
    out = small.parent / "out"
    chosen = ("--only", "Local", "--seeds", "7", "rounds=3")

    shown = output(capsys, "table", small, "--dry-run", *chosen, "--out", out).out

    twenty = "seeds to run 7; 20 clients; train-samples=0; positive-rate=1.0"  # the default
    assert shown.splitlines() == [
        "small: A small table",
        f"Local / all: {twenty}",
        f"Local / first: {twenty}",
        "Local / few: seeds to run 7; 3 clients; train-samples=10; positive-rate=0.5",
        "2 runs to make, 6 rounds in all",
    ]
    assert not out.exists()


def test_a_table_fails_without_its_data_but_not_with_nothing_to_make(small):
    """The row MNIST has no data; the second table has numbers of a paper only."""
    out = small.parent / "out"
    command = ["table", str(small), "--out", str(out)]

    assert main([*command, "--only", "MNIST", "rounds=3"]) == 1

    for suffix in ("md", "json", "tex"):
        text = (out / f"small.{suffix}").read_text()
        assert "All runs with rounds = 3." in text

    of_a_paper = "title: A paper's\ncolumns: {all: {}}\nrows: {FedRep: {paper: [97.5]}}\n"
    small.write_text(of_a_paper)

    assert main(command) == 0


SHARD = "must be I/N with I from 1 to N"


@pytest.mark.parametrize(("words", "expected"), [
    ("small.yaml --only FedTGP", "--only 'FedTGP': choose among Local, FedProto, MNIST"),
    ("small.yaml --seeds a", "--seeds 'a': must be whole numbers"),
    ("small.yaml lr=fast", "small: Local / all: lr = 'fast': must be a number above 0"),
    ("small.yaml seed=9", "seed = 9: a table has several; say --seeds 9"),
    ("small.yaml ./small.yaml", "small.yaml ./small.yaml"),
    ("small.yaml --json", "--json: a plan has no JSON; leave it out, or --dry-run"),
    ("rounds=3", "which table? Give a YAML file"),
    ("small.yaml --shard 0/4", f"--shard '0/4': {SHARD}"),
    ("small.yaml --shard 5/4", f"--shard '5/4': {SHARD}"),
    ("small.yaml --shard 2", f"--shard '2': {SHARD}"),
    ("small.yaml --shard a/b", f"--shard 'a/b': {SHARD}"),
    ("small.yaml --shard 1/2/3", f"--shard '1/2/3': {SHARD}"),
])  # fmt: skip
def test_a_wrong_command_line_is_named(words, expected, small, monkeypatch, capsys):
    monkeypatch.chdir(small.parent)
    assert expected in output(capsys, "table", "--dry-run", *words.split(), status=1).err


def test_a_job_of_slurms_array_has_its_shard(tmp_path):
    """The script is run with a stand-in for protofl that prints its arguments."""
    protofl = tmp_path / "protofl"
    protofl.write_text('#!/bin/sh\necho "$@"\n')
    protofl.chmod(0o755)
    job = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "16"}
    env = job | {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    script = ["bash", str(ROOT / "configs" / "slurm-table.sh"), "my table.yaml", "--out", "/shared"]
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=True)

    assert done.stdout == "table my table.yaml --out /shared --shard 3/16\n"


def test_each_run_has_its_settings_and_a_log(tmp_path, monkeypatch):
    """Three runs are made; the second is resumed, and the third fails."""
    attempts = []
    rounds = []
    failure = Failed("SettingsError", "why")

    def attempt(config, federation, on_event):
        attempts.append((config, federation))
        on_event(Said("a line of the run"))
        on_event(RoundDone(round_row(7, ["a"]), 20, 0.0))
        return failure if config["seed"] == 3 else tmp_path

    def launch_run(seed, resume):
        settings = Settings.from_run_config(default_run_config() | {"seed": seed})
        run = Run(f"run-{seed}", {"seed": seed}, {"num-supernodes": 2}, settings)
        return launch(run, tmp_path / "runs", resume, rounds.append, resources=two_cores_each)

    def two_cores_each(federation):
        return federation | {"client-resources-num-cpus": 2}

    monkeypatch.setattr(grid, "attempt", attempt)
    assert launch_run(1, resume=False) is None
    assert launch_run(2, resume=True) is None
    assert launch_run(3, resume=False) == failure

    assert rounds == [7, 7, 7]

    first_attempt, second_attempt, *_ = attempts
    config, federation = first_attempt
    named = {"seed": 1, "out-dir": f"{tmp_path}/runs", "run-name": "run-1"}

    assert config == default_run_config() | named
    assert federation == {"num-supernodes": 2, "client-resources-num-cpus": 2}
    config_of_second, _ = second_attempt
    assert config_of_second["resume"] is True

    log = tmp_path / "logs" / "run-1.log"
    assert log.read_text().startswith("a line of the run\nround  7/20  loss 0.143")


def test_the_processes_for_all_recipes_start_before_the_progress_is_drawn(
    small, tmp_path, monkeypatch
):
    """Three runs want one, two and one CPU a client: two engines."""
    started = []

    def start(federation, device):
        started.append(federation["client-resources-num-cpus"])

    monkeypatch.setattr(machine, "engine_for", start)
    any_cell, *_ = planned(small)
    cells = []
    for number, cpus in enumerate((1, 2, 1)):
        federation = {"client-resources-num-cpus": cpus}
        run = replace(any_cell.first_run, name=str(number), federation=federation)
        cells.append(replace(any_cell, runs={0: run}))

    start_engine([(read_table(small), cells)], Runs(tmp_path / "runs"), dict, "cpu")

    assert started == [1, 2]


# -- which figure stands in a cell ----------------------------------------------------------------
DOMAINS = {"0": "amazon", "1": "amazon", "2": "a dslr"}
TESTED = [(0.1, 0.2, 0.3), (0.9, 0.8, 0.4), (0.5, 0.6, 0.7)]
"""Evaluation -> site -> accuracy on test data."""
VALIDATED = [(0.9, 0.9, 0.9), (0.1, 0.2, 0.3), (0.6, 0.7, 0.5)]
"""On validation data the first evaluation is the best, which on test data is the worst."""


def evaluations(heads):
    """Return the evaluations in which three sites have these accuracies by head."""
    rows = []
    for accuracies in heads:
        rows.append({str(site): {"head": value} for site, value in enumerate(accuracies)})
    return rows


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of three sites with 10, 20 and 30 test samples and two domains."""
    server = {"local-prototypes": 30.0, "global-prototypes": 12.0}
    write_run(tmp_path, {}, evaluations(TESTED), domains=DOMAINS, server=server)
    return tmp_path


@pytest.mark.parametrize(("parts", "value"), [
    ({}, 60.0),
    ({"when": "best"}, 70.0),
    ({"when": "last-2"}, 65.0),
    ({"when": "last-9"}, (20 + 70 + 60) / 3),
    ({"domain": "amazon"}, 55.0),
    ({"domain": "a dslr", "when": "best"}, 70.0),
    ({"over": "by-samples"}, (50 * 10 + 60 * 20 + 70 * 30) / 60),
    ({"over": "std"}, 8.16496580927726),
    ({"over": "worst-10%"}, 50.0),
    ({"over": "worst-67%"}, 55.0),
    ({"over": "best-10%"}, 70.0),
    ({"what": "prototypes-received"}, 12.0),
    ({"what": "prototypes-sent"}, 10.0),
    ({"what": "numbers"}, (400 + 800) / 4),
    ({"what": "numbers", "when": "last-2"}, (100 + 300) / 2),
    ({"what": "numbers-sent"}, 400 / 4 / 3),
])  # fmt: skip
def test_a_figure_is_read_from_a_runs_folder(parts, value, folder):
    assert Figure.of(parts, "here").read(folder) == pytest.approx(value)


def test_the_best_is_not_a_lucky_draw_of_clients(tmp_path):
    """A round that asked two of three clients is not the best, though these are the better ones.

    With the deviation over the clients as figure, the best round is still that of the best mean.
    """
    better_half = {"0": {"head": 0.9}, "1": {"head": 0.9}}
    all_clients = evaluations([(0.0, 0.9, 0.9), (0.9, 0.9, 0.3)])
    write_run(tmp_path, {}, [better_half, *all_clients], domains=DOMAINS)

    best = Figure(when="best")
    assert best.read(tmp_path) == pytest.approx(70.0)

    described = best.measured(tmp_path).name
    assert described.endswith(", among the 2 of 3 evaluations that all clients made")
    assert Figure(when="best", over="std").read(tmp_path) == pytest.approx(100 * 0.08**0.5)


def test_a_figure_says_what_it_is_and_what_the_run_does_not_have(folder):
    """The run has three evaluations, by head alone, and two domains."""
    assert str(Figure("best", "head", "amazon", "worst-10%")) == "best head of amazon worst-10%"
    assert str(Figure()) == "final head"
    assert Figure("last-9").measured(folder).name == "last-9 head, of 3 evaluations"

    with pytest.raises(NoFigure, match="no evaluation of prototype after the last round"):
        Figure(what="prototype").read(folder)

    missing = "no client of domain 'webcam' with head; there are a dslr, amazon"
    with pytest.raises(NoFigure, match=missing):
        Figure(domain="webcam").read(folder)


def test_figures_of_hidden_clients_without_test_data_are_those_of_all_samples(tmp_path):
    """Secure aggregation leaves a mean on validation data, and the clients have no others."""
    write_run(tmp_path, {}, [{"0": {"head": 0.2}}])
    validation = {"head": {"mean": 0.5, "weighted": 0.5}}
    for name in ("metrics.jsonl", "summary.json"):
        content = json.loads((tmp_path / name).read_text())
        content |= {"accuracy": {}, "validation": validation}
        if "kind" in content:
            content["clients"] = {"0": {"accuracy": {}}}
        (tmp_path / name).write_text(json.dumps(content) + "\n")

    measured = Figure(what="validation/head").measured(tmp_path)

    assert measured == (50.0, "final validation/head over all samples")


def test_no_earlier_evaluation_takes_the_place_of_the_last(tmp_path):
    """Of three evaluations the last lacks the figure, as a metric that is not finite does."""
    heads = [{"0": {"head": 0.2}}, {"0": {"head": 0.4}}, {"0": {"prototype": 0.9}}]
    write_run(tmp_path, {}, heads)

    without = "no evaluation of head after the last round"
    with pytest.raises(NoFigure, match=rf"^{without} \(it has prototype\)$"):
        Figure().read(tmp_path)

    last_two = Figure("last-2")
    assert last_two.read(tmp_path) == pytest.approx(40.0)
    assert last_two.measured(tmp_path).name == "last-2 head, of 1 evaluations"

    nobody_answers = {}
    write_run(tmp_path, {}, [*heads, nobody_answers])
    with pytest.raises(NoFigure, match=f"^{without}$"):
        Figure().read(tmp_path)


def test_what_a_client_sends_is_a_mean_over_late_replies_too(tmp_path):
    """Two replies came in their round, and one of an earlier round counted; each had 40 bytes."""
    rows = [
        round_row(1, ["a", "b"], bytes={"up": 120, "down": 0}, **{"counted-late": {"c": 1}}),
        round_row(1, ["a", "b", "c"], kind="final"),
    ]
    write_run(tmp_path, {}, [{"a": {"head": 0.5}}])
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines)

    assert Figure(what="numbers-sent").read(tmp_path) == 10


@pytest.mark.parametrize(("what", "digits"), [
    ("head", 2), ("head/new-clients", 2), ("head/auc", 4), ("numbers", 1),
])  # fmt: skip
def test_accuracies_have_two_digits_metrics_four_and_numbers_one(what, digits):
    assert Figure(what=what).digits == digits


@pytest.mark.parametrize(("parts", "expected"), [
    ({"when": "first"}, "here: figure.when = 'first': choose final, best, last-N"),
    ({"what": "heads"}, "here: figure.what = 'heads': choose head, prototype, "),
    ({"of": "head"}, "here: figure.of: unknown; choose among when, what, domain, over"),
    ({"when": "best", "what": "numbers"}, "figure.when = 'best' needs an accuracy"),
    ({"over": "worst-101%"}, "figure.over = 'worst-101%': choose mean, by-samples, std, worst-N%"),
])  # fmt: skip
def test_a_wrong_figure_is_named(parts, expected):
    with pytest.raises(SettingsError) as error:
        Figure.of(parts, "here")
    assert expected in str(error.value)


@pytest.mark.parametrize(("parts", "value"), [
    ({"when": "best"}, 20.0),
    ({"when": "best", "over": "worst-10%"}, 10.0),
    ({"when": "best", "domain": "a dslr"}, 30.0),
    ({"when": "best", "what": "validation/head"}, 90.0),
    ({"what": "validation/head"}, 60.0),
    ({}, 60.0),
    ({"what": "validation/head", "over": "by-samples"}, (60 * 10 + 70 * 5 + 50 * 3) / 18),
])  # fmt: skip
def test_the_best_round_follows_validation_data(parts, value, folder):
    """The best is the first evaluation, which on test data alone would be the worst."""
    figure = Figure.of(parts, "here")
    is_best = figure.when == "best"
    chosen_on_test = ", its round chosen on test data" if is_best else ""

    if "validation" not in figure.what:  # which these runs do not have
        assert figure.measured(folder).name == f"{figure}{chosen_on_test}"

    validation = evaluations(VALIDATED)
    write_run(folder, {}, evaluations(TESTED), domains=DOMAINS, validation=validation)

    assert figure.read(folder) == pytest.approx(value)

    chosen_on_validation = ", its round chosen on validation data" if is_best else ""
    assert figure.measured(folder).name == f"{figure}{chosen_on_validation}"
