"""``protofl run``: how ``key=value`` is read, what it runs and shows, and errors beforehand."""

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from rich.console import Console

from protofl_common.config.options import SettingsError, key_of
from protofl_common.config.sections import SECTIONS
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config, known_keys
from protofl_common.runs.events import (
    Failed,
    Finished,
    RoundDone,
    Said,
    Started,
    Warned,
)
from protofl_common.simulation import grid, machine
from protofl_common.tools import arguments
from protofl_common.tools.arguments import RECIPES, federation_in, read_assignments, read_recipe
from protofl_common.tools.cli import main, run
from protofl_common.tools.cli.run import Screen
from tests.support.commands import output
from tests.support.fakes import row


@pytest.fixture
def attempts(monkeypatch, tmp_path):
    """The run config and federation config of each run that would have begun.

    A run with the name "bad" fails.
    """
    attempts = []

    def attempt(config, federation, on_event):
        """Stand in for a run, which fails if its name is "bad"."""
        attempts.append((dict(config), dict(federation)))
        on_event(Said("a line of the run"))
        if config["run-name"] == "bad":
            on_event(Failed("SettingsError", "why"))
            return Failed("SettingsError", "why")
        return tmp_path

    monkeypatch.setattr(grid, "attempt", attempt)
    monkeypatch.setattr(machine, "workers_for", lambda federation, device: 1)
    return attempts


def federation_of(clients):
    return {"num-supernodes": clients, "client-resources-num-cpus": 1}


def test_settings_go_over_the_defaults_of_ten_clients(attempts, capsys, tmp_path):
    """Without any word the defaults run with ten clients."""
    assert main(["run", "algo=fedplvm", "--clients", "20", "rounds=20", "models=cnn4"]) == 0

    config = default_run_config() | {"algo": "fedplvm", "rounds": 20, "models": "cnn4"}
    assert attempts == [(config, federation_of(20))]
    assert capsys.readouterr().out.splitlines() == [
        "a line of the run",
        f"next: {run.program()} predict {tmp_path}",
    ]

    assert main(["run"]) == 0
    assert attempts[1] == (default_run_config(), federation_of(10))


def test_a_recipe_alone_has_the_clients_of_its_comment(attempts, monkeypatch):
    """FedPCL's recipe says in a comment that it is for five."""
    monkeypatch.setattr(arguments, "check_data_are_here", lambda settings: None)
    assert main(["run", "--recipe", "configs/recipes/fedpcl-digits.toml"]) == 0

    config = default_run_config() | read_recipe("fedpcl-digits").settings
    assert attempts == [(config, federation_of(5))]


def test_a_recipe_may_hold_settings_of_several_algorithms_and_settings_beside_it_win(attempts):
    """`fedtgp-fmnist-practical` has FedProto's too."""
    settings = ["dataset=digits", "partition=iid", "test-from=split", "rounds=3"]
    settings += ["algo=fedproto", "fedproto.lambda=2"]
    options = ["--recipe", "fedtgp-fmnist-practical", "--clients", "2", "--gpus", "0.5"]

    assert main(["run", *options, *settings]) == 0

    ((config, federation),) = attempts
    assert federation == federation_of(2) | {"client-resources-num-gpus": 0.5}
    assert config["rounds"] == 3
    assert config["fedproto.distance"] == "l2"
    assert config["fedproto.lambda"] == 2.0
    assert config["fedtgp.lambda"] == 0.1


def test_own_data_are_read_before_anything_starts(attempts, capsys, tmp_path):
    """A file without the arrays that are needed is refused; the right one is run."""
    command = [*run_of_arrays(tmp_path), "partition=iid"]
    np.savez(tmp_path / "mine.npz", x=np.ones((4, 3)), y=np.arange(4))

    assert "mine.npz: has no 'inputs', only 'x', 'y'" in output(capsys, *command, status=1).err
    assert attempts == []

    np.savez(tmp_path / "mine.npz", inputs=np.ones((4, 3)), labels=np.arange(4))
    assert main(command) == 0


@pytest.mark.parametrize(("options", "clients"), [
    ("partition=natural", 3), ("partition=iid", 10), ("partition=natural --clients 2", 2),
])  # fmt: skip
def test_as_many_clients_as_the_data_name(options, clients, attempts, tmp_path):
    """A natural partition has the data's three clients unless ``--clients`` says otherwise."""
    sites = ["a", "a", "b", "b", "c", "c"]
    np.savez(tmp_path / "mine.npz", inputs=np.ones((6, 3)), labels=[0, 1] * 3, client=sites)

    assert main([*run_of_arrays(tmp_path), *options.split()]) == 0

    ((_, federation),) = attempts
    assert federation["num-supernodes"] == clients


def run_of_arrays(folder):
    places = [f"data-dir={folder / 'mine.npz'}", f"cache-dir={folder / 'cache'}"]
    return ["run", "dataset=arrays", *places]


def test_the_versions_of_protofl_flower_and_pytorch_are_printed(capsys):
    printed = output(capsys, "--version").out
    assert re.fullmatch(r"protofl \d\S+, flwr \d\S+, torch \d\S+\n", printed)


@pytest.mark.parametrize(("command", "hint"), [
    ("run", "; settings are KEY=VALUE without dashes, such as rounds=5"), ("report", ""),
])  # fmt: skip
def test_a_setting_with_dashes_is_refused(command, hint, capsys):
    with pytest.raises(SystemExit):
        main([command, "mine", "--rounds=5"])
    refusal = f"{command}: error: unrecognized arguments: --rounds=5{hint}\n"
    assert capsys.readouterr().err.endswith(refusal)


def test_a_failed_run_exits_with_1(attempts, capsys):
    assert output(capsys, "run", "run-name=bad", status=1).err == "protofl: this run has failed\n"
    assert main(["run", "run-name=bad", "--quiet"]) == 1

    lines = ["a line of the run", "protofl: this run cannot go on", "why"]
    assert capsys.readouterr().err.splitlines() == [*lines, "protofl: this run has failed"]


def test_the_program_is_named_so_that_a_shell_finds_it(monkeypatch, tmp_path):
    """In an environment that is not activated, as after ``make run``, it is named by its path."""
    file = Path(sys.executable).with_name("protofl")
    monkeypatch.chdir(file.parents[2])
    monkeypatch.setenv("PATH", str(tmp_path))

    assert run.program() == str(file.relative_to(file.parents[2]))

    monkeypatch.setenv("PATH", str(file.parent))
    assert run.program() == "protofl"


@pytest.mark.parametrize(("words", "expected"), [
    ("algo=fedx rounds=0", "algo = 'fedx': choose one of ditto,"),
    ("algo=fedx rounds=0", "rounds = 0: must be a whole number at least 1"),
    ("roundz=3", "roundz: unknown key; did you mean rounds?"),
    ("dataset=mnist partition=iid data-dir=/nowhere", "data-dir = '/nowhere'"),
    ("dataset=mnist download=true",
        "'mnist' needs files; set data-dir to their folder, which download = true can"),
    ("partition=feature-shift dataset=digits",
        "partition = 'feature-shift': dataset 'digits' has no domains"),
    ("--recipe fedprotto", "recipe = 'fedprotto': no such file; choose"),
    ("--recipe fedprotto", "fedproto-mnist-3way"),
    ("--clients 0", "--clients 0: must be at least 1"),
    ("algo=fedtgp fedproto.lambda=2",
        "fedproto.lambda = 2.0: has no effect on fedtgp, which reads fedtgp."),
    ("models=cnn4,torchvision:resnet19",
        "arch = 'torchvision:resnet19': architecture 'resnet19' is not one of"),
    ("algo=fedkd fedkd.student=timm:resnet18",
        "arch = 'timm:resnet18': timm is not installed; pip install"),
    ("arch=collections:Networks", "arch = 'collections:Networks': collections has no Networks"),
])  # fmt: skip
def test_what_is_wrong_is_named_before_anything_starts(
    words, expected, attempts, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert expected in output(capsys, "run", *words.split(), status=1).err
    assert attempts == []


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.usefixtures("attempts")
def test_ctrl_c_exits_with_130_and_a_hint(has_checkpoint, tmp_path, monkeypatch, capsys):
    """The hint is given only if the run has a checkpoint to go on from."""

    def interrupted(config, federation, on_event):
        on_event(Started(tmp_path, "FedProto", "Tan et al., AAAI 2022", baseline=False))
        if has_checkpoint:
            (tmp_path / "resume.toml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(grid, "attempt", interrupted)
    printed = output(capsys, "run", status=130).err

    assert ("to go on" in printed) is has_checkpoint
    assert (f"run --recipe {tmp_path}/resume.toml\n" in printed) is has_checkpoint


def test_every_recipe_says_its_federation():
    for path in RECIPES.glob("*.toml"):
        assert int(read_recipe(path.stem).federation["num-supernodes"]) > 1, path
    assert federation_in("algo = 'x'") == federation_of(10)


def test_a_recipe_that_is_not_toml_is_refused(tmp_path):
    (tmp_path / "bad.toml").write_text("algo = fedproto")
    with pytest.raises(SettingsError, match=r"bad.toml': not TOML"):
        read_recipe(str(tmp_path / "bad.toml"))


def test_every_key_has_the_type_that_its_field_declares():
    """The defaults have the types of the fields of all settings."""
    types = {key: type(value) for key, value in default_run_config().items()}
    assert set(types) == set(known_keys())

    sections = [("", section) for section in SECTIONS.values()]
    sections += [(f"{algo}.", row.hparams) for algo, row in CATALOG.items()]
    for prefix, section in sections:
        hints = get_type_hints(section)
        for field in fields(section):
            assert types[prefix + key_of(field.name)] is hints[field.name]


def test_the_declared_type_decides_how_a_value_is_read():
    """ "7" is a text for ``classes``, and "1" a floating point number for ``lr``."""
    words = ["algo=fedplvm", "rounds=20", "lr=1", "fedplvm.contrast=False"]
    words += ['run-name="a b"', "data-dir=/x=y", "classes=7"]
    settings = read_assignments(words)

    expected = {"algo": "fedplvm", "rounds": 20, "lr": 1.0, "fedplvm.contrast": False}
    expected |= {"run-name": "a b", "data-dir": "/x=y", "classes": "7"}

    assert settings == expected
    assert isinstance(settings["lr"], float)


def test_what_does_not_fit_stays_text_and_is_named_with_the_choices():
    """Four wrong words give four lines."""
    words = ["rounds=many", "algo=fedplvn", "keep-optimizer=2", "momentim=0.5"]
    config = default_run_config() | read_assignments(words)

    with pytest.raises(SettingsError) as error:
        Settings.from_run_config(config)

    lines = str(error.value).splitlines()
    assert lines[0] == "momentim: unknown key; did you mean momentum?"
    assert lines[1].startswith("algo = 'fedplvn': choose one of ditto, fedavg")
    assert lines[2] == "rounds = 'many': must be a whole number at least 1"
    assert lines[3] == "keep-optimizer = '2': must be true or false"


def test_words_that_are_no_settings_are_named():
    clients = r"clients=20: the number of simulated .* --clients 20\n"
    no_setting = "fedproto: must be key=value, such as algo=fedproto"
    with pytest.raises(SettingsError, match=clients + no_setting):
        read_assignments(["clients=20", "fedproto"])


GOOD_RUN = [
    Started(Path("/runs/mine"), "FedProto", "Tan et al., AAAI 2022", baseline=False),
    Said("models: 2 × cnn4"),
    RoundDone(row(1, ["a"]), 2, 2.8),
    RoundDone(row(2, ["a"]), 2, 0.0, "FedProto"),
    Said("┏━━━━━━━━━━━━━┓\n┃ a table     ┃"),
    Finished(
        Path("/runs/mine"),
        summary={},
        result="alone 36.0 %, FedProto 68.0 %; 96.5 MB exchanged",
        report="report: /runs/mine/report.html",
    ),
]
LINES = """
FedProto (Tan et al., AAAI 2022)
models: 2 × cnn4
round 1/2  loss 1.000  head 1.0% (worst 10.0%)  prototype 1.0% (worst 10.0%)  \
↑1.0 kB ↓2.0 kB  2.0s, 2.8s to go
FedProto: round 2/2  loss 0.500  head 2.0% (worst 10.0%)  prototype 2.0% (worst 10.0%)  \
↑1.0 kB ↓2.0 kB  2.0s, 0.0s to go
┏━━━━━━━━━━━━━┓
┃ a table     ┃
""".strip().splitlines()
RESULT = """
result: alone 36.0 %, FedProto 68.0 %; 96.5 MB exchanged
results: /runs/mine
report: /runs/mine/report.html
next: protofl list
""".strip().splitlines()


def shown(events, capsys, **options):
    """Return the lines that a screen shows of a run's events, and of its end if it is good."""
    with Screen(**options) as screen:
        for event in events:
            screen(event)
    if events is GOOD_RUN:
        screen.conclude("protofl list")
    return capsys.readouterr().out.splitlines()


def test_a_good_run_shows_all_and_quietly_the_result_alone(capsys):
    assert shown(GOOD_RUN, capsys) == LINES + RESULT
    assert shown(GOOD_RUN, capsys, quiet=True) == RESULT


def test_a_dumb_terminal_is_shown_lines(capsys):
    looks = {"no_color": True, "soft_wrap": True, "highlight": False}
    dumb = Console(force_terminal=True, _environ={"TERM": "dumb"}, **looks)
    assert shown(GOOD_RUN[:5], capsys, console=dumb) == LINES


def test_quiet_shows_doubts_too_and_keeps_what_a_failure_refers_to(capsys):
    """Warnings are shown at the end; of all else the last lines are kept."""
    doubt = Warned("accuracy by head is 50.0 %, no better than a guess")
    assert shown([*GOOD_RUN[:5], doubt], capsys, quiet=True) == []

    screen = Screen(quiet=True)
    for number in range(50):
        screen(Said(f"line {number}"))
    screen(doubt)
    screen.conclude("")

    assert capsys.readouterr().out == f"{doubt}\n"
    assert [*screen.recent][-2:] == ["line 49", str(doubt)]


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_has_one_live_line_and_a_box(no_color):
    """The box has the result; colours depend on ``no_color``."""
    console = Console(force_terminal=True, width=100, no_color=no_color, highlight=False)
    with console.capture() as captured, Screen(console=console) as screen:
        for event in GOOD_RUN:
            screen(event)
        screen.conclude("protofl list")
    screen_text = captured.get()

    assert screen_text.count("╭") == screen_text.count("╰") == 1
    assert "alone 36.0 %" in screen_text.partition("╭")[2]
    assert ("\x1b[32m" in screen_text) != no_color
    assert LINES[0] in screen_text
    assert LINES[-1] in screen_text
