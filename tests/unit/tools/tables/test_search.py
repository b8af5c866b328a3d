"""``protofl table --search``: chosen on validation data alone, as many trials for each row, and nothing made twice."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from protofl_common.config.options import Scalar, SettingsError
from protofl_common.experiment.settings import default_run_config, to_run_config
from protofl_common.tools.cli import main
from protofl_common.tools.cli.table import _shard, execute
from protofl_common.tools.tables.plan import Run, Runs, plan
from protofl_common.tools.tables.search import check_search
from protofl_common.tools.tables.spec import read_table
from tests.support.commands import SCHEMA
from tests.support.fakes import write_run
from tests.support.given import Printed
from tests.support.harness import CACHE, run_federation

pytest.importorskip("optuna")
TABLE = """
title: Tuned
recipe: digit-domains
seeds: [1, 2]
against: Local
figure: {when: best, what: head}
settings: {rounds: 2, train-samples: 40, validation-fraction: 0.25}
trials: 7
trial-seeds: [11, 12]
search: {lr: {log: [0.001, 0.1]}}
columns:
  all:
rows:
  Local: {settings: {algo: local}}
  FedProto: {settings: {algo: fedproto}, search: {fedproto.lambda: {range: [0.5, 8]}, local-epochs: [1, 5]}}
  as it is: {settings: {algo: fedavg}, grid: {momentum: [0, 0.9], batch-size: [5]}, search: {lr: [0.03]}}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.yaml"
    path.write_text(TABLE, encoding="utf-8")
    return path


class Launcher:
    """The smaller ``lr`` is, the better is the figure on validation data, and the worse on test data."""

    def __init__(self, stop_at: int = 0) -> None:
        self.launched: list[Run] = []
        self.stop_at = stop_at
        self.broken: Callable[[Run], bool] = lambda run: False
        self.silent: Callable[[Run], bool] = lambda run: (
            False
        )  # it has no figure on validation data

    def __call__(
        self, run: Run, folder: Path, resume: bool, on_round: Callable[[int], None]
    ) -> str:
        self.launched.append(run)
        if len(self.launched) == self.stop_at:
            raise KeyboardInterrupt
        if self.broken(run):
            return "it exploded"
        lr = run.settings.training.lr
        tested, validated = (
            [{"0": {"head": one}}, {"0": {"head": one / 2}}] for one in (lr, 0.5 - lr)
        )
        sites = {f"{site}": {"head": 0.0} for site in range(int(run.federation["num-supernodes"]))}
        validated = [{}, {}] if self.silent(run) else validated
        write_run(
            folder / run.name,
            to_run_config(run.settings),
            [sites | one for one in tested],
            validation=validated,
        )
        return ""


def search(
    path: Path, launcher: Launcher, overrides: dict[str, Scalar] | None = None, shard: str = "1/1"
) -> int:
    found = read_table(path)
    cells, out = plan(found, overrides=overrides or {}), path.parent
    check_search(found, cells)
    more = {"trials": Runs(out / "trials", patience=-1), "shard": _shard(shard)}
    return execute([(found, cells)], Runs(out / "runs"), launcher, out, Console(quiet=True), **more)


def chosen(path: Path) -> dict[str, dict]:
    content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return {cell["row"]: cell for cell in content["cells"]}


def test_every_row_has_as_many_trials_and_the_best_on_validation_data_runs_with_other_seeds(
    table: Path,
) -> None:
    launcher = Launcher()
    assert search(table, launcher) == 0
    trials = [run for run in launcher.launched if run.settings.run.seed in (11, 12)]
    finals = [run for run in launcher.launched if run not in trials]
    for algo in ("local", "fedproto"):
        of_row = {run.settings.training.lr for run in trials if run.settings.run.algo == algo}
        assert len(of_row) == 7
        assert {run.settings.training.lr for run in finals if run.settings.run.algo == algo} == {
            min(of_row)
        }
        assert 0.05 in of_row, "the row's own setting is the first trial"
    assert {run.settings.run.seed for run in finals} == {1, 2}
    found, grid = (
        chosen(table),
        {f"as it is, momentum {momentum}, batch-size 5" for momentum in (0, 0.9)},
    )
    assert set(found) == {"Local", "FedProto"} | grid
    assert found["FedProto"]["search"]["trials"] == 7
    assert found["FedProto"]["search"]["chosen-on"] == "validation"
    assert set(found["FedProto"]["search"]["settings"]) == {"lr", "fedproto.lambda", "local-epochs"}
    assert found["FedProto"]["difference"]["n"] == 2
    row = next(
        row
        for row in csv.DictReader((table.parent / "tuned.csv").open())
        if row["row"] == "FedProto"
    )
    assert json.loads(row["chosen"])["settings"] == found["FedProto"]["search"]["settings"]
    text = (table.parent / "tuned.md").read_text(encoding="utf-8")
    assert "best head, its round chosen on validation data" in text
    assert (
        "chosen on validation data, by trials that no row has more of; test data chose none. 7 trials"
        in text
    )
    assert text.count("test data chose none") == 1
    assert "## Against Local" in text
    assert "paper" not in text, "no row has a number of a paper's"

    content = json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))
    jsonschema.validate({"command": "table", "format": 1, "tables": [content]}, SCHEMA)


@pytest.mark.slow
def test_shards_of_a_search_are_whole_cells(table: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts" / table.name
    parts.parent.mkdir()
    parts.write_text(TABLE, encoding="utf-8")
    search(table, whole := Launcher())
    made = []
    for shard in ("2/2", "1/2"):
        search(parts, launcher := Launcher(), shard=shard)
        made += [run.name for run in launcher.launched]
    assert sorted(made) == sorted(run.name for run in whole.launched)
    assert parts.with_suffix(".md").read_text() == table.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [2, 17])
def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(
    stop_at: int, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(table, first := Launcher(stop_at))
    search(table, second := Launcher())
    assert [run.name for run in first.launched[:-1] + second.launched].count(
        first.launched[0].name
    ) == 1
    search(table, third := Launcher())
    assert third.launched == []
    whole = tmp_path / "whole" / "tuned.yaml"
    whole.parent.mkdir()
    whole.write_text(TABLE, encoding="utf-8")
    search(whole, Launcher())
    assert chosen(whole) == chosen(table)


def test_more_trials_go_on_from_those_that_were_made(table: Path) -> None:
    search(table, Launcher())
    table.write_text(TABLE.replace("trials: 7", "trials: 8"), encoding="utf-8")
    search(table, more := Launcher())

    assert sum(run.settings.run.seed == 11 for run in more.launched) == 2


@pytest.mark.slow
def test_trials_that_fail_count_and_are_tried_again(table: Path) -> None:
    launcher = Launcher()
    launcher.broken = lambda run: run.settings.training.lr < 0.02 and run.settings.run.seed > 10
    assert search(table, launcher) == 0
    found = chosen(table)["Local"]["search"]
    assert found["settings"]["lr"] >= 0.02
    assert (found["trials"], found["failed"] > 0) == (7, True)
    search(table, again := Launcher())
    assert {
        run.settings.training.lr < 0.02 for run in again.launched if run.settings.run.seed > 10
    } == {True}
    assert chosen(table)["Local"]["search"]["failed"] == 0
    again.silent = launcher.broken
    table.write_text(TABLE.replace("rounds: 2", "rounds: 4"), encoding="utf-8")
    search(table, again)
    found = chosen(table)["Local"]["search"]
    assert (found["trials"], found["failed"] > 0) == (7, True)
    launcher.broken = lambda run: True
    table.write_text(TABLE.replace("rounds: 2", "rounds: 3"), encoding="utf-8")
    search(table, launcher)
    assert (
        chosen(table)["Local"]["reason"]
        == "search: none of 7 trials ended well: it exploded; it exploded"
    )


@pytest.mark.parametrize(("change", "said"), [
    (
        ("validation-fraction: 0.25", "lr: 0.05"),
        "validation-fraction = 0.0: --search chooses on validation data only",
    ),
    (("trials: 7", ""), "trials: missing"),
    (("lr: {log: [0.001, 0.1]}", "alpha: [0.1, 0.2]"), "search: alpha: changes the data"),
    (("lr: {log: [0.001, 0.1]}", "lr: {range: [-1, 1]}"), "Local / all: search: lr = -1: must be a number above 0"),
    (("lr: {log: [0.001, 0.1]}", "fedtgp.tau: [1]"), "search: fedtgp.tau: unknown key"),
    (("lr: {log: [0.001, 0.1]}", "fedtgp.lambda: [1]"), "row Local: search: fedtgp.lambda: is no setting of local"),
    (("log: [0.001, 0.1]", "log: [0.1, 0.001]"), "search: lr = {'log': [0.1, 0.001]}: must be a list of values"),
    (("momentum: [0, 0.9]", "momentum: 0"), "grid: momentum = 0: must be a list of values"),
    (("trial-seeds: [11, 12]", "trial-seeds: [1]"), "trial-seeds = [1]: must be a list of whole numbers, none of"),
    (("against: Local", "against: Nobody"), "against = 'Nobody': must be one of Local, FedProto"),
    (("what: head}", "what: head, over: std}"), "--search looks for the largest accuracy or metric, not for"),
])  # fmt: skip
def test_a_search_that_cannot_work_is_refused(
    change: tuple[str, str], said: str, table: Path
) -> None:
    table.write_text(TABLE.replace(*change), encoding="utf-8")
    with pytest.raises(SettingsError, match=re.escape(said)):
        search(table, Launcher())


def test_the_command_says_what_is_left_and_that_a_search_does_not_count_is_said(
    table: Path, capsys: Printed
) -> None:
    assert main(["table", str(table), "--search", "--seeds", "11", "--dry-run"]) == 1
    assert "tuned: trial-seeds: 11: the final runs have this seed, too" in capsys.readouterr().err
    assert main(["table", str(table), "--search", "--dry-run", "--out", str(table.parent)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "7 of 7 trials are to be made first" in out
    assert out.endswith("to search: 56 runs of trials; then 8 runs of what they choose")
    search(table, Launcher())
    for more, said in (([], True), (["--search"], False)):
        assert main(["table", str(table), "--out", str(table.parent), "--dry-run", *more]) == 0
        assert ("tuned: without --search the settings of" in capsys.readouterr().out) is said


PLANTED_TABLE = """
title: Planted
recipe: table-breast-cancer
seeds: [1, 2]
figure: {{when: best, what: head}}
settings: {{dataset: arrays, data-dir: {file}, test-from: official, partition: natural, rounds: 3,
            validation-fraction: 0.2}}
trials: 3
trial-seeds: [11]
search: {{lr: [0.000001, 0.001, 0.02]}}
columns: {{all: {{clients: 2}}}}
rows: {{Local: {{settings: {{algo: local}}}}}}
"""
PLANTED = "site{site},{split},{x:.3f},{y:.3f},{label}\n"


@pytest.mark.slow
def test_search_and_best_round_follow_validation_where_test_data_say_the_opposite(
    tmp_path: Path,
) -> None:
    """On labels that are turned round in the test part: who learns is right on validation data alone."""
    rows = "client,split,x,y,label\n"
    for number in range(160):
        split, label = ("train", "train", "validation", "test")[number % 4], number // 4 % 2
        x = (1 if label else -1) * (1 + number % 7 / 10)
        rows += PLANTED.format(
            site=number // 8 % 2, split=split, x=x, y=number % 5, label=label ^ (split == "test")
        )
    (tmp_path / "planted.csv").write_text(rows, encoding="utf-8")
    (tmp_path / "planted.yaml").write_text(
        PLANTED_TABLE.format(file=tmp_path / "planted.csv"), encoding="utf-8"
    )
    folders = tmp_path / "one-by-one"

    def launch(run: Run, folder: Path, resume: bool, on_round: Callable[[int], None]) -> str:
        more = CACHE | {
            "run-name": run.name,
            "out-dir": str(folders / run.name),
            "report": False,
            "threads": 1,
        }
        folder.mkdir(parents=True, exist_ok=True)
        run_federation(default_run_config() | run.config | more, clients=2).folder.rename(
            folder / run.name
        )
        return ""

    found, trials = read_table(tmp_path / "planted.yaml"), Runs(tmp_path / "trials")
    execute(
        [(found, plan(found))],
        Runs(tmp_path / "runs"),
        launch,
        tmp_path,
        Console(quiet=True),
        trials,
    )
    cell = chosen(tmp_path / "planted.yaml")["Local"]
    assert cell["search"]["settings"]["lr"] > 0.0001
    assert cell["search"]["value"] > 80
    assert cell["figure"] == "best head, its round chosen on validation data"
    assert cell["estimate"]["mean"] < 20
