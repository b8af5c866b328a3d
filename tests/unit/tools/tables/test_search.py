"""``protofl table --search``: chosen on validation data alone, the same number of trials a row."""

import json
import re

import jsonschema
import pytest
from rich.console import Console

from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import default_run_config, to_run_config
from protofl_common.tools.cli import main
from protofl_common.tools.cli.table import _shard, execute
from protofl_common.tools.tables.plan import Runs, plan
from protofl_common.tools.tables.search import check_search
from protofl_common.tools.tables.spec import read_table
from tests.support import launches
from tests.support.commands import SCHEMA
from tests.support.fakes import write_run
from tests.support.harness import CACHE, run_federation

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
  FedProto:
    settings: {algo: fedproto}
    search: {fedproto.lambda: {range: [0.5, 8]}, local-epochs: [1, 5]}
  as it is:
    settings: {algo: fedavg}
    grid: {momentum: [0, 0.9], batch-size: [5]}
    search: {lr: [0.03]}
"""


@pytest.fixture
def table(tmp_path):
    return written(tmp_path)


def written(folder):
    """Write the table into a folder of its own; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / "tuned.yaml"
    path.write_text(TABLE)
    return path


def is_trial(run):
    return run.settings.run.seed in (11, 12)  # `TABLE`'s trial-seeds


def lr_of(run):
    return run.settings.training.lr


class Launcher(launches.Launcher):
    """Stands for making runs: it writes what a run would leave.

    The smaller ``lr`` is, the better is a run on validation data, and the worse on test data.
    """

    def __init__(self, silent=launches.none, **options):
        """Runs that are ``silent`` have no figure on validation data."""
        super().__init__(**options)
        self.silent = silent

    def finish(self, run, folder):
        clients = int(run.federation["num-supernodes"])
        others = {str(site): {"head": 0.0} for site in range(1, clients)}

        def both_evaluations(accuracy):
            """Return client 0's accuracy in two evaluations, of which the first is better."""
            return [{"0": {"head": accuracy}}, {"0": {"head": accuracy / 2}}]

        tested = [evaluation | others for evaluation in both_evaluations(lr_of(run))]
        validated = both_evaluations(0.5 - lr_of(run))
        if self.silent(run):
            validated = [{}, {}]
        write_run(folder, to_run_config(run.settings), tested, validation=validated)


def search(path, launcher, shard="1/1"):
    """Make a table with ``--search``; return the exit status."""
    spec = read_table(path)
    cells = plan(spec)
    check_search(spec, cells)
    out = path.parent
    trials = Runs(out / "trials", patience=-1)
    options = {"trials": trials, "shard": _shard(shard)}
    console = Console(quiet=True)
    return execute([(spec, cells)], Runs(out / "runs"), launcher, out, console, **options)


def cells_of(path):
    """Return the cell of each row in the result."""
    content = json.loads(path.with_suffix(".json").read_text())
    return {cell["row"]: cell for cell in content["cells"]}


@pytest.mark.slow
def test_every_row_has_as_many_trials_and_the_best_on_validation_data_runs_with_other_seeds(table):
    """Two rows search by seven trials each; the smallest ``lr`` is the best on validation data."""
    launcher = Launcher()
    assert search(table, launcher) == 0

    trials = [run for run in launcher.runs if is_trial(run)]
    finals = [run for run in launcher.runs if not is_trial(run)]

    assert {run.settings.run.seed for run in finals} == {1, 2}

    tried_by = {}
    for algo in ("local", "fedproto"):
        tried = {lr_of(run) for run in trials if run.settings.run.algo == algo}
        assert len(tried) == 7
        assert 0.05 in tried, "the row's own setting is the first trial"
        taken = {lr_of(run) for run in finals if run.settings.run.algo == algo}
        assert taken == {min(tried)}
        tried_by[algo] = tried

    assert tried_by["local"] == tried_by["fedproto"], "rows try the same values of a setting"


@pytest.mark.slow
def test_the_result_says_what_was_chosen_and_on_what(table):
    """Markdown and JSON name the trials, the settings that were chosen, and the data that chose."""
    search(table, Launcher())

    cells = cells_of(table)
    grid = {f"as it is, momentum {momentum}, batch-size 5" for momentum in (0, 0.9)}

    assert set(cells) == {"Local", "FedProto"} | grid

    ours = cells["FedProto"]
    assert ours["search"]["trials"] == 7
    assert ours["search"]["chosen-on"] == "validation"
    assert set(ours["search"]["settings"]) == {"lr", "fedproto.lambda", "local-epochs"}
    assert ours["difference"]["n"] == 2

    text = table.with_suffix(".md").read_text()
    assert "best head, its round chosen on validation data" in text

    note = "chosen on validation data, by trials that no row has more of; test data chose none"
    assert f"{note}. 7 trials" in text
    assert text.count("test data chose none") == 1
    assert "## Against Local" in text
    assert "paper" not in text, "no row has a number of a paper's"

    content = json.loads(table.with_suffix(".json").read_text())
    jsonschema.validate({"command": "table", "format": 1, "tables": [content]}, SCHEMA)


@pytest.mark.slow
def test_shards_of_a_search_are_whole_cells(table, tmp_path):
    """Two shards, the second one first, make the runs and the table of one search."""
    whole = Launcher()
    search(table, whole)

    in_parts = written(tmp_path / "parts")
    names = []
    for shard in ("2/2", "1/2"):
        launcher = Launcher()
        search(in_parts, launcher, shard)
        names += launcher.launched

    assert sorted(names) == sorted(whole.launched)
    assert in_parts.with_suffix(".md").read_text() == table.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [2, 17])  # in the first row that searches, and later
def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(stop_at, table, tmp_path):
    """Finished runs are not repeated, and the result is that of a search made at once."""
    stopped = Launcher(interrupt_at=stop_at)
    with pytest.raises(KeyboardInterrupt):
        search(table, stopped)

    goes_on = Launcher()
    search(table, goes_on)
    first_finished, *others_finished, _interrupted = stopped.launched

    assert first_finished not in others_finished + goes_on.launched

    nothing_left = Launcher()
    search(table, nothing_left)

    assert nothing_left.runs == []

    at_once = written(tmp_path / "whole")
    search(at_once, Launcher())

    assert cells_of(table) == cells_of(at_once)


@pytest.mark.slow
def test_more_trials_go_on_from_those_that_were_made(table):
    """The number of trials grows from seven to eight."""
    search(table, Launcher())
    table.write_text(TABLE.replace("trials: 7", "trials: 8"))
    launcher = Launcher()
    search(table, launcher)

    # the eighth trial, of each of the two rows that search
    assert len([run for run in launcher.runs if run.settings.run.seed == 11]) == 2


def is_unlucky(run):
    """Return whether this is one of the trials that a test lets fail: the best ones."""
    return is_trial(run) and lr_of(run) < 0.02


@pytest.mark.slow
def test_trials_that_fail_count_and_are_tried_again(table):
    """The best trials fail the first time, so that another value of ``lr`` is chosen."""
    assert search(table, Launcher(broken=is_unlucky)) == 0

    found = cells_of(table)["Local"]["search"]
    assert found["settings"]["lr"] >= 0.02
    assert found["trials"] == 7
    assert found["failed"] > 0

    again = Launcher()
    search(table, again)

    assert all(is_unlucky(run) for run in again.runs if is_trial(run))
    assert any(is_trial(run) for run in again.runs)
    assert cells_of(table)["Local"]["search"]["failed"] == 0


def test_trials_without_a_figure_on_validation_data_have_failed(table):
    search(table, Launcher(silent=is_unlucky))
    found = cells_of(table)["Local"]["search"]

    assert found["trials"] == 7
    assert found["failed"] > 0


def test_a_search_whose_trials_all_fail_says_why(table):
    search(table, Launcher(broken=lambda run: True))
    reason = "search: none of 7 trials ended well: it exploded; it exploded"
    assert cells_of(table)["Local"]["reason"] == reason


LOG = "lr: {log: [0.001, 0.1]}"


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("validation-fraction: 0.25", "lr: 0.05",
        "validation-fraction = 0.0: --search chooses on validation data only"),
    ("trials: 7", "", "trials: missing"),
    (LOG, "alpha: [0.1, 0.2]", "search: alpha: changes the data"),
    (LOG, "lr: {range: [-1, 1]}", "Local / all: search: lr = -1: must be a number above 0"),
    (LOG, "fedtgp.tau: [1]", "search: fedtgp.tau: unknown key"),
    (LOG, "fedtgp.lambda: [1]", "row Local: search: fedtgp.lambda: is no setting of local"),
    (LOG, "lr: {log: [0.1, 0.001]}",
        "search: lr = {'log': [0.1, 0.001]}: must be a list of values"),
    ("momentum: [0, 0.9]", "momentum: 0", "grid: momentum = 0: must be a list of values"),
    ("trial-seeds: [11, 12]", "trial-seeds: [1]",
        "trial-seeds = [1]: must be a list of whole numbers, none of"),
    ("against: Local", "against: Nobody", "against = 'Nobody': must be one of Local, FedProto"),
    ("what: head}", "what: head, over: std}",
        "--search looks for the largest accuracy or metric, not for"),
])  # fmt: skip
def test_a_search_that_cannot_work_is_refused(old, new, expected, table):
    table.write_text(TABLE.replace(old, new))
    with pytest.raises(SettingsError, match=re.escape(expected)):
        search(table, Launcher())


@pytest.mark.slow
def test_the_command_says_what_is_left_and_that_a_search_does_not_count_is_said(table, capsys):
    """A plan (``--dry-run``) with ``--search`` waits for the trials.

    Without ``--search`` it says that the settings that were found do not count.
    """
    command = ["table", str(table), "--dry-run"]
    assert main([*command, "--search", "--seeds", "11"]) == 1
    assert "tuned: trial-seeds: 11: the final runs have this seed, too" in capsys.readouterr().err

    command += ["--out", str(table.parent)]
    assert main([*command, "--search"]) == 0

    assert "Local / all: skipped: search: its 7 trials" in capsys.readouterr().out

    search(table, Launcher())
    ignored = "tuned: without --search the settings of"

    assert main(command) == 0
    assert ignored in capsys.readouterr().out
    assert main([*command, "--search"]) == 0
    assert ignored not in capsys.readouterr().out


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


def planted_rows():
    """Return a table of two sites whose test labels are turned round: 0 for 1 and 1 for 0.

    A label can be told from the sign of x.
    """
    splits = ("train", "train", "validation", "test")
    lines = ["client,split,x,y,label"]
    for number in range(160):
        site = number // 8 % 2
        split = splits[number % 4]
        label = number // 4 % 2
        size = 1 + number % 7 / 10  # so that samples differ
        x = size if label == 1 else -size
        shown = 1 - label if split == "test" else label
        lines.append(f"site{site},{split},{x:.3f},{number % 5:.3f},{shown}")
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_search_and_best_round_follow_validation_where_test_data_say_the_opposite(tmp_path):
    """A model that learns is right on validation data, and wrong on test data."""
    data = tmp_path / "planted.csv"
    data.write_text(planted_rows())
    path = tmp_path / "planted.yaml"
    path.write_text(PLANTED_TABLE.format(file=data))

    def launch(run, folder, resume, on_round):
        out = tmp_path / "one-by-one" / run.name
        config = default_run_config() | run.config | CACHE
        config |= {"run-name": run.name, "out-dir": str(out), "report": False, "threads": 1}
        folder.mkdir(parents=True, exist_ok=True)
        outcome = run_federation(config, clients=2)
        outcome.folder.rename(folder / run.name)

    spec = read_table(path)
    runs = Runs(tmp_path / "runs")
    trials = Runs(tmp_path / "trials")
    execute([(spec, plan(spec))], runs, launch, tmp_path, Console(quiet=True), trials)

    cell = cells_of(path)["Local"]
    assert cell["search"]["settings"]["lr"] > 0.0001
    assert cell["search"]["value"] > 80
    assert cell["figure"] == "best head, its round chosen on validation data"
    assert cell["estimate"]["mean"] < 20
