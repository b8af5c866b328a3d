"""Tables: their files, what runs, what is not repeated, how the result looks, and which figure stands in a cell."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from protofl_common.config.datasets import REDIVIDED
from protofl_common.config.options import Config, SettingsError
from protofl_common.config.python_names import allowing
from protofl_common.experiment.settings import Settings, default_run_config, to_run_config
from protofl_common.tools import local
from protofl_common.tools.cli import main
from protofl_common.tools.cli.arguments import RECIPES, ROOT
from protofl_common.tools.cli.runs import HEAVY
from protofl_common.tools.cli.table import execute
from protofl_common.tools.tables.figure import Figure, NoFigure
from protofl_common.tools.tables.plan import Run, Runs, launch, own_files, plan, runs_of
from protofl_common.tools.tables.spec import read_table
from tests.support.fakes import write_run
from tests.support.given import Patch, Printed

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
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


class Launcher:
    """Instead of Flower: runs of ``fedproto`` with seed 2 fail, and one may be interrupted after its first round."""

    broken = "fedproto-digits-s2"
    lost: tuple[str, ...] = ()
    """What the summary of the run that would else fail says of replies."""
    interrupt_at, damaged, models = 0, False, False

    def __init__(self, **changes: Any) -> None:
        self.launched: list[str] = []
        self.resumed: list[str] = []
        vars(self).update(changes)

    def __call__(
        self, run: Run, folder: Path, resume: bool, on_round: Callable[[int], None]
    ) -> str:
        self.launched.append(run.name)
        here = folder / run.name
        assert here.exists() is resume
        self.resumed += [run.name] if resume else []
        if resume and self.damaged:
            return "resume = true: the run was started with other settings"
        if len(self.launched) == self.interrupt_at:
            (here / "checkpoints").mkdir(parents=True)
            raise KeyboardInterrupt
        strikes = bool(self.broken) and run.name.startswith(self.broken)
        if strikes and not self.lost:
            return "it exploded"
        on_round(1)
        clients = int(run.federation["num-supernodes"])
        base = (0.5 if run.settings.run.algo == "local" else 0.75) + 0.01 * run.settings.run.seed
        sites = {str(site): {"head": base} for site in range(clients)}
        for part in ("clients/site-0", "checkpoints") if self.models else ():
            (here / part).mkdir(parents=True)
        warnings = self.lost if strikes else ()
        write_run(
            here,
            to_run_config(run.settings),
            [sites] * 3,
            dict.fromkeys(sites, "a"),
            warnings=warnings,
        )
        return ""


def run_table(path: Path, launcher: Launcher, said: StringIO | None = None, **chosen: Any) -> int:
    """``said``: where a console of 200 columns prints, which is no terminal."""
    table = read_table(path)
    console = Console(file=said, width=200, quiet=said is None)
    return execute(
        [(table, plan(table, **chosen))], Runs(path.parent / "runs"), launcher, path.parent, console
    )


@pytest.mark.parametrize("path", TABLES, ids=[path.stem for path in TABLES])
def test_every_cell_has_right_settings_and_a_column_the_same_clients(
    path: Path, monkeypatch: Patch
) -> None:
    """However many recipes a table has: the data set, its division and what is tested are not a row's."""
    monkeypatch.setattr("protofl_common.tools.tables.plan.check_data_are_here", lambda data: None)
    table = read_table(path)
    cells = plan(table, seeds=(1,))
    assert {cell.column for cell in cells} == set(table.columns)
    assert any(row.paper for row in table.rows.values()) == ("no paper's" not in table.source)
    for name, row in table.rows.items():
        settings = table.settings | row.settings
        assert row.runs, f"{name}: nothing runs; the catalog has it"
        assert "algo" in settings
    of_columns: dict[str, dict[str, object]] = {}
    for cell in cells:
        row, run = table.rows[cell.row], cell.runs[1]
        found = asdict(run.settings.data) | {"clients": run.federation["num-supernodes"]}
        first = of_columns.setdefault(cell.column, found)
        differ = {key for key in found if found[key] != first[key]} - {
            key.replace("-", "_") for key in row.settings
        }
        assert not differ, f"{cell.row} in {cell.column}"
        assert (
            path.stem != "fedpcl-table6"
            or "label" not in found["partition"]
            or found["test_from"] == "balanced"
        )
        config = to_run_config(
            run.settings
        )  # FedTGP, Appendix A: T_end; a group's smallest network, else its first
        if path.stem.startswith("fedtgp") and config["algo"] == "fedkd":
            small = "cnn4" if config["models"].startswith(("resnet", "htcnn8")) else ""
            assert (config["fedkd.energy-end"], config["fedkd.student"]) == (0.95, small)


def test_every_recipe_stands_in_a_table() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in TABLES)
    assert [path.stem for path in RECIPES.glob("*.toml") if path.stem not in text] == []


def test_what_runs_and_that_defaults_said_aloud_and_another_place_are_the_same_run(
    small: Path,
) -> None:
    table = read_table(small)
    cells = plan(table)
    by_name = {(cell.row, cell.column): cell for cell in cells}
    assert set(by_name[("Local", "all")].runs) == {1, 2}
    assert by_name[("Local", "all")].runs[1].name == by_name[("Local", "first")].runs[1].name
    few = by_name[("FedProto", "few")].runs[2]
    assert few.federation == {"num-supernodes": 3, "client-resources-num-cpus": 1}
    assert few.config["train-samples"] == 10
    assert few.config["seed"] == 2
    assert few.config["fedproto.lambda"] == 0.5
    assert "data-dir = 'data/no'" in by_name[("MNIST", "all")].skipped
    names = [run.name for run in runs_of(cells)]
    assert len(names) == 8
    assert names == [
        run.name for run in runs_of(plan(table, overrides={"momentum": 0.5, "threads": 1}))
    ]
    assert names != [run.name for run in runs_of(plan(table, overrides={"momentum": 0.9}))]


def test_a_row_needs_no_settings_and_a_table_no_recipe(small: Path) -> None:
    small.write_text(SMALL.replace("  FedRep:", "  as it is:\n  FedRep:"))
    runs = [
        run
        for cell in plan(read_table(small))
        if cell.row == "as it is"
        for run in cell.runs.values()
    ]
    assert {run.settings.run.algo for run in runs} == {default_run_config()["algo"]}
    small.write_text(SMALL.replace("recipe: fedproto-mnist-3way\n", ""), encoding="utf-8")
    run = plan(read_table(small))[0].runs[1]
    assert (run.federation["num-supernodes"], to_run_config(run.settings)["lr"]) == (
        10,
        default_run_config()["lr"],
    )
    small.write_text(
        SMALL.replace("rounds: 2,", "rounds: 2, lr: 1e-3,"), encoding="utf-8"
    )  # a number, to YAML a text
    assert {run.settings.training.lr for run in runs_of(plan(read_table(small)))} == {0.001}


def test_the_data_folder_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    (tmp_path / "office10" / "amazon" / "mug").mkdir(parents=True)
    table = read_table(ROOT / "configs" / "tables" / "fedplvm-office10.yaml")
    run = plan(table, data_dir=str(tmp_path))[0].runs[1]
    assert run.config["data-dir"] == str(tmp_path / "office10")
    assert plan(table, data_dir=str(tmp_path / "elsewhere"))[0].skipped
    (tmp_path / "subset").mkdir()
    (tmp_path / "office10").rename(tmp_path / "subset" / "office10")
    assert plan(table, data_dir=str(tmp_path / "subset"))[0].runs[1].name != run.name


@pytest.mark.parametrize("key", ["arch", "dataset"])
def test_edited_code_of_ones_own_makes_another_run(
    key: str, small: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its name stands in the settings, not its code: a finished run of the old code would pass for one of the new."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (package := tmp_path / "edited_nets").mkdir()
    (package / "__init__.py").write_text("from torch import nn\n")
    (layers := package / "layers.py").write_text("class Net: ...\n")

    def names() -> set[str]:
        for module in [name for name in sys.modules if name.startswith("edited_nets")]:
            del sys.modules[module]
        with allowing(["edited_nets"]):
            cells = plan(
                read_table(small), overrides={key: "edited_nets.layers:Net", "partition": "iid"}
            )
        return {run.name for run in runs_of(cells)}

    before = names()
    assert names() == before
    layers.write_text("class Net: 1\n")
    assert len(names() - before) == len(before) > 0


@pytest.mark.parametrize("dataset", ["arrays", "manifest", "json:load"])
def test_edited_data_or_division_are_another_run(
    dataset: str, small: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    (file := tmp_path / "patients.csv").write_text("age,label\n1,ill\n2,well\n")

    def names() -> set[str]:
        own_files.cache_clear()  # a process reads them once
        with allowing(["json"]):
            cells = plan(
                read_table(small),
                overrides={"dataset": dataset, "data-dir": str(file), "partition": "iid"},
            )
        return {run.name for run in runs_of(cells)}

    before = names()
    assert names() == before
    file.write_text("age,label\n1,ill\n2,well\n3,well\n")
    assert len((after := names()) - before) == len(before) > 0
    monkeypatch.setitem(REDIVIDED, "iid", 2)
    assert not names() & after


@pytest.mark.parametrize("damaged", [False, True])
def test_finished_runs_stay_interrupted_ones_go_on_failed_ones_begin_anew(
    damaged: bool, small: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_table(small, launcher := Launcher(interrupt_at=4))
    first = launcher.launched[:]
    assert len(first) == 4
    assert "| Local | 51.50 ± 0.71 | 98.26 ± 0.40 |" in (small.parent / "small.md").read_text(
        encoding="utf-8"
    )

    launcher = Launcher(damaged=damaged)
    assert run_table(small, launcher) == 1
    assert launcher.resumed == first[3:]
    assert launcher.launched[: 1 + damaged] == first[3:] * (1 + damaged)
    assert not set(launcher.launched) & set(first[:3])

    launcher = Launcher(broken="")
    assert run_table(small, launcher) == 0
    assert [name.rpartition("-")[0] for name in launcher.launched] == ["fedproto-digits-s2"] * 2

    launcher = Launcher()
    assert run_table(small, launcher) == 0
    assert launcher.launched == []


@pytest.mark.parametrize("keep", [False, True])
def test_a_finished_run_keeps_its_models_only_on_request(keep: bool, small: Path) -> None:
    run, runs = (
        runs_of(plan(read_table(small), seeds=(2,), only=("Local",)))[0],
        Runs(small.parent / "runs", keep),
    )
    runs.execute(run, Launcher(models=True), lambda number: None)
    left = {path.name for path in runs.folder_of(run).iterdir()}
    assert not runs.failed
    assert left & set(HEAVY) == (set(HEAVY) if keep else set())


def test_a_run_that_another_process_makes_is_left_to_it(small: Path) -> None:
    chosen: dict[str, Any] = {"seeds": (1,), "only": ("Local",)}
    other, mine = runs_of(plan(read_table(small), **chosen))
    launcher, said = Launcher(), StringIO()
    with Runs(small.parent / "runs").lock(other.name):
        assert run_table(small, launcher, said, **chosen) == 0
    assert launcher.launched == [mine.name]
    wanted = {
        f"  another process makes {other.name}",
        f"  {mine.name}: round 1/2",
        f"  done: {mine.name}",
    }
    assert wanted <= set(said.getvalue().splitlines())
    assert "| Local | … | 98.26 ± 0.40 |" in (small.parent / "small.md").read_text(encoding="utf-8")


def test_shards_are_all_runs_and_share_none(small: Path) -> None:
    launched = []
    for number in range(3):
        launcher, table = Launcher(), read_table(small)
        here, cells = small.parent / str(number), plan(table)
        runs, console = Runs(here / "runs"), Console(quiet=True)
        execute([(table, cells)], runs, launcher, here, console, shard=slice(number, None, 3))
        launched += launcher.launched
    assert sorted(launched) == sorted(run.name for run in runs_of(plan(read_table(small))))


def test_a_run_of_other_settings_in_the_same_place_is_repeated(small: Path) -> None:
    cells, runs = plan(read_table(small), only=("Local",)), Runs(small.parent / "runs")
    run = runs_of(cells)[0]
    sites, settings = {str(site): {"head": 0.5} for site in range(20)}, to_run_config(run.settings)
    for changed, finished in (({}, True), ({"device": "cuda"}, True), ({"lr": 0.5}, False)):
        write_run(runs.folder_of(run), settings | changed, [sites])
        assert runs.finished(run) is finished
    write_run(runs.folder_of(run), settings, [dict(list(sites.items())[:3])])
    assert not runs.finished(run)


def latex_lines(file: Path) -> list[str]:
    """Without the spaces that align columns."""
    return [" ".join(line.split()) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_result_as_markdown_and_csv(small: Path) -> None:
    assert run_table(small, Launcher()) == 1
    assert (small.parent / "small.md").read_text(encoding="utf-8") == MARKDOWN
    latex = latex_lines(small.parent / "small.tex")
    head = r"& all & paper & first & paper & few & paper \\"
    assert latex[4:7] == [r"\begin{tabular}{lrrrrrr}", r"\toprule", head]
    assert (
        latex[8]
        == r"Local & 51.50 $\pm$ 0.71 & 98.26 $\pm$ 0.40 & 51.50 $\pm$ 0.71 & & 51.50 $\pm$ 0.71 & 90 \\"
    )
    lines = (small.parent / "small.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "row,column,state,mean,std,seeds,paper,figure,values,reason,chosen"
    assert (
        lines[1] == "Local,all,done,51.5000,0.7071,2,98.26 ± 0.40,final head,1:51.0000 2:52.0000,,"
    )
    assert lines[4] == "FedRep,all,paper only,,,0,97.5,,,,"
    assert lines[7] == "FedProto,all,failed,76.0000,,1,,final head,1:76.0000,seed 2: it exploded,"


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
- MNIST (all, first, few): skipped: data-dir = 'data/no': there is no such folder (dataset 'mnist'); \
name another, or set download = true
"""


@pytest.mark.parametrize(("change", "said"), [
    (("title: A small table", ""), "title: missing"),
    (("rows:", "rows: {a: }\nrows:"), "not YAML: 'rows' stands twice"),
    (("rows:", "rowz: 1\nrows:"), "rowz: unknown key; did you mean rows?"),
    (("seeds: [1, 2]", "seeds: 3"), "seeds = 3: must be a list of whole numbers"),
    (("fedproto.lambda", "fedproto.lamda"), "row FedProto: settings: fedproto.lamda: unknown key"),
    (("clients: 3", "clients: 0"), "column few: clients = 0: must be a whole number, at least 1"),
    (("{few: 1.5}", "{many: 1.5}"), "row gain: paper: no column 'many'"),
    (("null, 90]", "null, 90, 91]"), "row Local: paper has 4 numbers for 3 columns"),
    (("{paper: [97.5]}", "{paper: 97.5}"), "row FedRep: paper = 97.5: must be a number for each column"),
    (("{paper: [97.5]}", "fedrep"), "row FedRep = 'fedrep': must be key: value pairs"),
    (("  all:\n", "  all: 5\n"), "column all = 5: must be key: value pairs"),
    (("rounds: 2,", "rounds: 2, seed: 9,"), "settings: seed: must not be there; list them under seeds"),
])  # fmt: skip
def test_a_wrong_table_is_refused(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(SMALL.replace(*change), encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        read_table(path)
    assert f"wrong.yaml: {said}" in str(error.value)
    path.write_bytes(SMALL.encode("utf-16"))
    with pytest.raises(SettingsError, match=r"wrong\.yaml: not UTF-8"):
        read_table(path)


def test_a_setting_that_a_rows_algorithm_does_not_read_is_named(small: Path) -> None:
    """One that the whole table shares may be another row's; one of the command line acts on some row."""
    small.write_text(SMALL.replace("rounds: 2,", "rounds: 2, fedtgp.lambda: 1,"), encoding="utf-8")
    plan(read_table(small))
    small.write_text(
        SMALL.replace("algo: local}", "algo: local, fedproto.lambda: 2}"), encoding="utf-8"
    )
    with pytest.raises(SettingsError) as error:
        plan(read_table(small))
    why = "fedproto.lambda = 2: has no effect on local, which reads no settings of its own"
    assert str(error.value).splitlines() == [
        f"small: Local / {column}: {why}" for column in ("all", "first", "few")
    ]

    chosen: Config = {"lr": 0.1, "fedproto.lambda": 3.0, "fedtgp.lambda": 2.0}
    small.write_text(SMALL, encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        plan(read_table(small), overrides=chosen)
    reads = ", ".join(
        f"fedproto.{key}" for key in ("lambda", "distance", "granularity", "weighting")
    )
    ons = f"on local, which reads no settings of its own; on fedproto, which reads {reads}"
    assert str(error.value) == f"fedtgp.lambda = 2.0: has no effect {ons}"
    small.write_text(
        SMALL.replace("{dataset: mnist", "{algo: fedtgp, dataset: mnist"), encoding="utf-8"
    )
    assert any(
        cell.skipped for cell in plan(read_table(small), overrides=chosen)
    )  # without data it could act on


def test_replies_that_failed_stand_below_the_table(small: Path) -> None:
    lost = "2 of 40 replies failed or were refused, the last: ValueError: mine"
    assert run_table(small, Launcher(lost=(lost,), broken="fedproto")) == 0
    notes = [
        line
        for line in (small.parent / "small.md").read_text(encoding="utf-8").splitlines()
        if line[:2] == "- "
    ]
    assert notes[0] == f"- FedProto (all, first, few): warning: seed 1, 2: {lost}"
    assert len(notes) == 2


def test_the_best_of_finished_cells_is_bold_in_latex_and_differences_are_a_table_of_their_own(
    small: Path,
) -> None:
    small.write_text(f"{SMALL}against: FedProto\n", encoding="utf-8")
    run_table(small, Launcher())
    assert (
        r"Local & few & 2 (1 paired) & 51.50 & 45.15 \ldots{} 57.85 & $-$25.00 & -- & -- \\"
        in latex_lines(small.parent / "small.against.tex")
    )
    small.write_text(f"{SMALL}against: Local\n", encoding="utf-8")
    run_table(small, Launcher(broken=""))
    latex = "\n".join(latex_lines(small.parent / "small.tex"))
    assert r"Local & 51.50 $\pm$ 0.71 & 98.26 $\pm$ 0.40 & " in latex
    assert r"FedProto & \textbf{76.50 $\pm$ 0.71} & & \textbf{76.50 $\pm$ 0.71} & & " in latex
    against = latex_lines(small.parent / "small.against.tex")
    assert against[:7:6] == [
        "% A note.",
        r"& column & n & mean & 95 \% interval & difference & 95 \% interval & p \\",
    ]
    own = r"2 & 76.50 & 70.15 \ldots{} 82.85 & +25.00 & 25.00 \ldots{} 25.00 & \ensuremath{<} 0.001 \\"
    assert rf"FedProto & few & {own}" in against
    for less_is_better in ("{what: numbers}", "{over: std}"):
        text = SMALL.replace("figure: {when: final, what: head}", f"figure: {less_is_better}")
        small.write_text(text.replace("{figure: {domain: a}}", ""), encoding="utf-8")
        run_table(small, Launcher(broken=""))
        assert "textbf" not in (small.parent / "small.tex").read_text(encoding="utf-8")


def test_rows_that_do_not_run_now_keep_their_results(small: Path) -> None:
    run_table(small, launcher := Launcher(broken=""))
    before = (small.parent / "small.md").read_text()
    run_table(small, launcher, only=("Local",))
    assert (small.parent / "small.md").read_text() == before
    assert (
        "–"
        not in next(line for line in before.splitlines() if line.startswith("| FedProto")).split(
            "|"
        )[2]
    )


def test_the_command_shows_what_would_run(small: Path, capsys: Printed, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    small.write_text(
        SMALL.replace("train-samples: 10", "train-samples: 10, positive-rate: 0.5"),
        encoding="utf-8",
    )
    out = ["--out", str(small.parent / "out")]
    assert (
        main(
            ["table", str(small), "--dry-run", "--only", "Local", "--seeds", "7", "rounds=3", *out]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: A small table"
    assert [line.split() for line in lines[2:4]] == [
        [
            "Local",
            "all",
            "7",
            "–",
            "20",
            "3",
            "train-samples=0",
            "positive-rate=1.0",
        ],  # which is the default
        ["Local", "first", "7", "–", "20", "3", "train-samples=0", "positive-rate=1.0"],
    ]
    assert lines[4].split() == [
        "Local",
        "few",
        "7",
        "–",
        "3",
        "3",
        "train-samples=10",
        "positive-rate=0.5",
    ]
    assert lines[5:] == ["2 runs to make, 6 rounds in all; 0 runs are finished"]
    assert not (small.parent / "out").exists()
    assert main(["table", str(small), "--only", "MNIST", "rounds=3", *out]) == 1, (
        "without its data nothing is made"
    )
    small.write_text(
        "title: A paper's\ncolumns: {all: {}}\nrows: {FedRep: {paper: [97.5]}}\n", encoding="utf-8"
    )
    assert main(["table", str(small), "--out", str(small.parent / "paper")]) == 0, (
        "there is nothing to make"
    )
    for suffix in ("md", "json", "tex"):
        assert "All runs with rounds = 3." in (small.parent / "out" / f"small.{suffix}").read_text(
            encoding="utf-8"
        )


@pytest.mark.parametrize(("words", "said"), [
    (["--only", "FedTGP"], "--only 'FedTGP': choose among Local, FedProto, MNIST"),
    (["--seeds", "a"], "--seeds 'a': must be whole numbers"),
    (["lr=fast"], "small: Local / all: lr = 'fast': must be a number above 0"),
    (["seed=9"], "seed = 9: a table has several; say --seeds 9"),
    *((["--shard", n], f"--shard {n!r}: must be I/N with I from 1 to N") for n in ("0/4", "5/4", "2", "a/b", "1/2/3")),
    (["rounds=3"], "which table? Give a YAML file"),
    (["./small.yaml"], "small.yaml ./small.yaml"),
    (["--json"], "--json: a plan has no JSON; leave it out, or --dry-run"),
])  # fmt: skip
def test_a_wrong_command_line_is_named(
    words: list[str], said: str, small: Path, capsys: Printed
) -> None:
    table = [] if words == ["rounds=3"] else [str(small), "--dry-run"]
    assert main(["table", *table, *words]) == 1
    assert said in capsys.readouterr().err


def test_a_job_of_slurms_array_has_its_shard(tmp_path: Path) -> None:
    (tmp_path / "protofl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "protofl").chmod(0o755)
    slurm = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_ARRAY_TASK_COUNT": "16",
    }
    script = ["bash", str(ROOT / "configs" / "slurm-table.sh"), "my table.yaml", "--out", "/shared"]
    started = subprocess.run(script, env=slurm, capture_output=True, text=True, check=True)
    assert started.stdout == "table my table.yaml --out /shared --shard 3/16\n"


def a_run(seed: int) -> Run:
    config = {"seed": seed}
    return Run(
        f"run-{seed}",
        config,
        {"num-supernodes": 2},
        Settings.from_run_config(default_run_config() | config),
    )


def test_each_run_has_its_settings_and_a_log(tmp_path: Path, monkeypatch: Patch) -> None:
    seen: list[Any] = []

    def attempt(
        config: Any, federation: Any, on_line: Callable[[str], None]
    ) -> tuple[Path | None, str]:
        seen.append((config, federation))
        on_line("round  7/20  loss 1.0")
        return (None, "why") if config["seed"] == 3 else (tmp_path, "")

    monkeypatch.setattr(local, "attempt", attempt)
    rounds: list[int] = []
    more = {"resources": lambda federation: federation | {"client-resources-num-cpus": 2}}
    assert launch(a_run(1), tmp_path / "runs", False, rounds.append, **more) == ""
    assert launch(a_run(2), tmp_path / "runs", True, rounds.append, **more) == ""
    assert launch(a_run(3), tmp_path / "runs", False, rounds.append, **more) == "why"
    assert rounds == [7, 7, 7]
    first = default_run_config() | {"seed": 1, "out-dir": f"{tmp_path}/runs", "run-name": "run-1"}
    assert seen[0] == (first, {"num-supernodes": 2, "client-resources-num-cpus": 2})
    assert seen[1][0]["resume"] is True
    assert (tmp_path / "logs" / "run-1.log").read_text(
        encoding="utf-8"
    ) == "round  7/20  loss 1.0\n"


DOMAINS = {"0": "amazon", "1": "amazon", "2": "a dslr"}
HEADS = [(0.1, 0.2, 0.3), (0.9, 0.8, 0.4), (0.5, 0.6, 0.7)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    evaluations = [
        {str(site): {"head": accuracy} for site, accuracy in enumerate(heads)} for heads in HEADS
    ]
    server = {"local-prototypes": 30.0, "global-prototypes": 12.0}
    write_run(tmp_path, {}, evaluations, domains=DOMAINS, server=server)
    return tmp_path


@pytest.mark.parametrize(("parts", "value"), [
    ({}, 60.0), ({"when": "best"}, 70.0), ({"when": "last-2"}, 65.0), ({"when": "last-9"}, (20 + 70 + 60) / 3),
    ({"domain": "amazon"}, 55.0), ({"domain": "a dslr", "when": "best"}, 70.0),
    ({"over": "by-samples"}, (50 * 10 + 60 * 20 + 70 * 30) / 60), ({"over": "std"}, 8.16496580927726),
    ({"over": "worst-10%"}, 50.0), ({"over": "worst-67%"}, 55.0), ({"over": "best-10%"}, 70.0),
    ({"what": "prototypes-received"}, 12.0), ({"what": "prototypes-sent"}, 10.0),
    ({"what": "numbers"}, (400 + 800) / 4), ({"what": "numbers", "when": "last-2"}, (100 + 300) / 2),
])  # fmt: skip
def test_a_figure(parts: dict[str, Any], value: float, folder: Path) -> None:
    assert Figure.of(parts, "here").read(folder) == pytest.approx(value)


def test_the_best_is_not_a_lucky_draw_of_clients(tmp_path: Path) -> None:
    """A round that asked the better half of the clients only; nor is it the round of the largest deviation."""
    half: dict[str, dict[str, float]] = {"0": {"head": 0.9}, "1": {"head": 0.9}}
    low: dict[str, dict[str, float]] = {"0": {"head": 0.0}, "1": {"head": 0.9}, "2": {"head": 0.9}}
    write_run(tmp_path, {}, [half, low, half | {"2": {"head": 0.3}}], domains=DOMAINS)
    assert Figure(when="best").read(tmp_path) == pytest.approx(70.0)
    assert (
        Figure(when="best")
        .described(tmp_path)
        .endswith(", among the 2 of 3 evaluations that all clients made")
    )
    assert Figure(when="best", over="std").read(tmp_path) == pytest.approx(100 * 0.08**0.5)


def test_a_figure_says_what_it_is_and_what_the_run_does_not_have(folder: Path) -> None:
    assert str(Figure("best", "head", "amazon", "worst-10%")) == "best head of amazon worst-10%"
    assert [str(Figure()), Figure("last-9").described(folder)] == [
        "final head",
        "last-9 head, of 3 evaluations",
    ]
    assert [
        Figure(what=what).digits for what in ("head", "head/new-clients", "head/auc", "numbers")
    ] == [2, 2, 4, 1]
    with pytest.raises(NoFigure, match="no evaluation of prototype"):
        Figure(what="prototype").read(folder)
    with pytest.raises(
        NoFigure, match="no client of domain 'webcam' with head; there are a dslr, amazon"
    ):
        Figure(domain="webcam").read(folder)


@pytest.mark.parametrize(("parts", "said"), [
    ({"when": "first"}, "here: figure.when = 'first': choose final, best, last-N"),
    ({"what": "heads"}, "here: figure.what = 'heads': choose head, prototype, "),
    ({"of": "head"}, "here: figure.of: unknown; choose among when, what, domain, over"),
    ({"when": "best", "what": "numbers"}, "figure.when = 'best' needs an accuracy"),
])  # fmt: skip
def test_a_wrong_figure_is_named(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        Figure.of(parts, "here")
    assert said in str(error.value)


PLANTED = [(0.9, 0.9, 0.9), (0.1, 0.2, 0.3), (0.6, 0.7, 0.5)]
"""On validation data the first evaluation is the best, which on test data is the worst."""


@pytest.mark.parametrize(("parts", "value"), [
    ({"when": "best"}, 20.0), ({"when": "best", "over": "worst-10%"}, 10.0),
    ({"when": "best", "domain": "a dslr"}, 30.0), ({"when": "best", "what": "validation/head"}, 90.0),
    ({"what": "validation/head"}, 60.0), ({}, 60.0),
    ({"what": "validation/head", "over": "by-samples"}, (60 * 10 + 70 * 20 + 50 * 30) / 60),
])  # fmt: skip
def test_the_best_round_follows_validation_data(
    parts: dict[str, Any], value: float, folder: Path
) -> None:
    tested, validated = (
        [{f"{i}": {"head": x} for i, x in enumerate(of)} for of in rows]
        for rows in (HEADS, PLANTED)
    )
    figure = Figure.of(parts, "here")
    chosen = ", its round chosen on test data" if figure.when == "best" else ""
    assert figure.described(folder) == f"{figure}{chosen}"
    write_run(folder, {}, tested, domains=DOMAINS, validation=validated)
    assert figure.read(folder) == pytest.approx(value)
    assert figure.described(folder) == f"{figure}{chosen.replace('test', 'validation')}"
