"""``protofl run``: how ``key=value`` is read, what it runs and shows, and errors before anything starts."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from rich.console import Console

from protofl_common.config.options import SettingsError, key_of
from protofl_common.config.sections import SECTIONS
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings, default_run_config, known_keys
from protofl_common.tools import local
from protofl_common.tools.cli import main, run
from protofl_common.tools.cli.arguments import RECIPES, federation_in, read_assignments, read_recipe
from protofl_common.tools.cli.run import Screen
from tests.support.commands import output
from tests.support.given import Patch, Printed

Attempt = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
def attempts(monkeypatch: Patch, tmp_path: Path) -> list[Attempt]:
    """The run configs and federation configs that would have run."""
    seen: list[Attempt] = []

    def attempt(
        config: Any, federation: Any, on_line: Callable[[str], None]
    ) -> tuple[Path | None, str]:
        seen.append((dict(config), dict(federation)))
        on_line("a line of the run")
        return (None, "why") if config["run-name"] == "bad" else (tmp_path, "")

    monkeypatch.setattr(local, "attempt", attempt)
    monkeypatch.setattr(local, "workers_for", lambda federation, device: 1)
    return seen


def test_settings_go_over_the_defaults_of_ten_clients(
    attempts: list[Attempt], capsys: Printed, tmp_path: Path
) -> None:
    assert main(["run", "algo=fedplvm", "--clients", "20", "rounds=20", "models=cnn4"]) == 0
    config = default_run_config() | {"algo": "fedplvm", "rounds": 20, "models": "cnn4"}
    assert attempts == [(config, {"num-supernodes": 20, "client-resources-num-cpus": 1})]
    assert capsys.readouterr().out.splitlines() == [
        "a line of the run",
        f"next: {run.program()} predict {tmp_path}",
    ]
    assert main(["run"]) == 0
    assert attempts[1] == (
        default_run_config(),
        {"num-supernodes": 10, "client-resources-num-cpus": 1},
    )


def test_a_recipe_alone_has_the_clients_of_its_comment(
    attempts: list[Attempt], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(run, "check_data_are_here", lambda settings: None)
    assert main(["run", "--recipe", "configs/recipes/fedpcl-digits.toml"]) == 0
    recipe = read_recipe("fedpcl-digits")
    assert attempts == [
        (
            default_run_config() | recipe.settings,
            {"num-supernodes": 5, "client-resources-num-cpus": 1},
        )
    ]


def test_a_recipe_may_hold_settings_of_several_algorithms_and_settings_beside_it_win(
    attempts: list[Attempt],
) -> None:
    """`fedtgp-fmnist-practical` has FedProto's too."""
    words = [
        "dataset=digits",
        "partition=iid",
        "test-from=split",
        "rounds=3",
        "--clients",
        "2",
        "--gpus",
        "0.5",
    ]
    words += ["algo=fedproto", "fedproto.lambda=2"]
    assert main(["run", "--recipe", "fedtgp-fmnist-practical", *words]) == 0
    ((config, federation),) = attempts
    assert federation == {
        "num-supernodes": 2,
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": 0.5,
    }
    assert (config["rounds"], config["fedproto.distance"]) == (3, "l2")
    assert (config["fedtgp.lambda"], config["fedproto.lambda"]) == (0.1, 2.0)


def test_own_data_are_read_before_anything_starts(
    attempts: list[Attempt], capsys: Printed, tmp_path: Path
) -> None:
    file = tmp_path / "mine.npz"
    words = [
        "run",
        "dataset=arrays",
        "partition=iid",
        f"data-dir={file}",
        f"cache-dir={tmp_path / 'cache'}",
    ]
    np.savez(file, x=np.ones((4, 3)), y=np.arange(4))
    assert "mine.npz: has no 'inputs', only 'x', 'y'" in output(capsys, *words, status=1).err
    assert attempts == []
    np.savez(file, inputs=np.ones((4, 3)), labels=np.arange(4))
    assert main(words) == 0


def test_versions_and_settings_with_dashes(capsys: Printed) -> None:
    assert re.fullmatch(
        r"protofl \d\S+, flwr \d\S+, torch \d\S+\n", output(capsys, "--version").out
    )
    for command, hint in (
        ("run", "; settings are KEY=VALUE without dashes, such as rounds=5\n"),
        ("report", "\n"),
    ):
        with pytest.raises(SystemExit):
            main([command, "mine", "--rounds=5"])
        assert capsys.readouterr().err.endswith(
            f"{command}: error: unrecognized arguments: --rounds=5{hint}"
        )


def test_a_failed_run_exits_with_1(attempts: list[Attempt], capsys: Printed) -> None:
    assert output(capsys, "run", "run-name=bad", status=1).err == "protofl: this run has failed\n"
    assert main(["run", "run-name=bad", "--quiet"]) == 1
    assert capsys.readouterr().err == "a line of the run\nwhy\nprotofl: this run has failed\n"


def test_the_program_is_named_so_that_a_shell_finds_it(monkeypatch: Patch, tmp_path: Path) -> None:
    """In an environment that is not activated, as after ``make run``, by its path."""
    file = Path(sys.executable).with_name("protofl")
    monkeypatch.chdir(file.parents[2])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.program() == str(file.relative_to(file.parents[2]))
    monkeypatch.setenv("PATH", str(file.parent))
    assert run.program() == "protofl"


@pytest.mark.parametrize(("words", "said"), [
    ("algo=fedx rounds=0", ["algo = 'fedx': choose one of local,", "rounds = 0: must be a number at least 1"]),
    ("roundz=3", ["roundz: unknown key; did you mean rounds?"]),
    ("dataset=mnist partition=iid data-dir=/nowhere", ["data-dir = '/nowhere'"]),
    ("dataset=mnist download=true", ["'mnist' needs files; set data-dir to their folder, which download = true can"]),
    ("partition=feature-shift dataset=digits", ["partition = 'feature-shift': dataset 'digits' has no domains"]),
    ("--recipe fedprotto", ["recipe = 'fedprotto': no such file; choose", "fedproto-mnist-3way"]),
    ("--clients 0", ["--clients 0: must be at least 1"]),
    ("algo=fedtgp fedproto.lambda=2", ["fedproto.lambda = 2.0: has no effect on fedtgp, which reads fedtgp."]),
    ("models=cnn4,torchvision:resnet19", ["arch = 'torchvision:resnet19': architecture 'resnet19' is not one of"]),
    ("algo=fedkd fedkd.student=timm:resnet18", ["arch = 'timm:resnet18': timm is not installed; pip install"]),
    ("arch=collections:Networks", ["arch = 'collections:Networks': collections has no Networks"]),
])  # fmt: skip
def test_what_is_wrong_is_named_before_anything_starts(
    words: str, said: list[str], attempts: list[Attempt], capsys: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    told = output(capsys, "run", *words.split(), status=1).err
    assert all(part in told for part in said), told
    assert attempts == []


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.usefixtures("attempts")
def test_ctrl_c_exits_with_130_and_a_hint(
    resumed: bool, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """Also where the run was stopped before, so that its resume.toml is older than this command, and in a baseline."""
    for number, name in enumerate(("mine", "other", "mine-local"), 1):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        os.utime(tmp_path / name / "checkpoints", (number * 1e8, number * 1e8))
        (tmp_path / name / "resume.toml").touch()

    def interrupted(*_: object) -> None:
        if resumed:
            os.utime(tmp_path / "mine-local" / "checkpoints", (3e9, 3e9))
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "attempt", interrupted)
    said = output(capsys, "run", f"out-dir={tmp_path}", "baselines=local", status=130).err
    assert ("to go on" in said) == resumed
    assert not resumed or f"run --recipe {tmp_path}/mine/resume.toml\n" in said


def test_as_many_clients_as_the_data_name(attempts: list[Attempt], tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mine.npz",
        inputs=np.ones((6, 3)),
        labels=[0, 1] * 3,
        client=["a", "a", "b", "b", "c", "c"],
    )
    words = [
        "run",
        "dataset=arrays",
        f"data-dir={tmp_path / 'mine.npz'}",
        f"cache-dir={tmp_path / 'cache'}",
    ]
    for more, number in (
        ("partition=natural", 3),
        ("partition=iid", 10),
        ("partition=natural --clients 2", 2),
    ):
        assert main([*words, *more.split()]) == 0
        assert attempts[-1][1]["num-supernodes"] == number


def test_every_recipe_says_its_federation_and_one_that_is_not_toml_is_refused(
    tmp_path: Path,
) -> None:
    for path in RECIPES.glob("*.toml"):
        assert int(read_recipe(path.stem).federation["num-supernodes"]) > 1, path
    assert federation_in("algo = 'x'") == {"num-supernodes": 10, "client-resources-num-cpus": 1}
    (tmp_path / "bad.toml").write_text("algo = fedproto")
    with pytest.raises(SettingsError, match=r"bad.toml': not TOML"):
        read_recipe(str(tmp_path / "bad.toml"))


def test_every_key_has_the_type_that_its_field_declares() -> None:
    types = {key: type(value) for key, value in default_run_config().items()}
    assert set(types) == set(known_keys())
    sections = [("", section) for section in SECTIONS.values()]
    for prefix, section in [
        *sections,
        *((f"{algo}.", row.hparams) for algo, row in CATALOG.items()),
    ]:
        hints = get_type_hints(section)
        for field in fields(section):
            assert types[prefix + key_of(field.name)] is hints[field.name]


def test_the_declared_type_decides_how_a_value_is_read() -> None:
    words = ["algo=fedplvm", "rounds=20", "lr=1", "fedplvm.contrast=False", 'run-name="a b"', "data-dir=/x=y",
        "classes=7"]  # fmt: skip
    read = read_assignments(words)
    wanted = {
        "algo": "fedplvm",
        "rounds": 20,
        "lr": 1.0,
        "fedplvm.contrast": False,
        "run-name": "a b",
    }
    assert read == wanted | {"data-dir": "/x=y", "classes": "7"}
    assert isinstance(read["lr"], float)


def test_what_does_not_fit_stays_text_and_is_named_with_the_choices() -> None:
    read = read_assignments(["rounds=many", "algo=fedplvn", "keep-optimizer=2", "momentim=0.5"])
    with pytest.raises(SettingsError) as error:
        Settings.from_run_config(default_run_config() | read)
    lines = str(error.value).splitlines()
    assert lines[0] == "momentim: unknown key; did you mean momentum?"
    assert lines[1].startswith("algo = 'fedplvn': choose one of local, fedavg")
    assert lines[2] == "rounds = 'many': must be a whole number at least 1"
    assert lines[3] == "keep-optimizer = '2': must be true or false"
    said = r"clients=20: the number of simulated .* --clients 20\nfedproto: must be key=value, such as algo=fedproto"
    with pytest.raises(SettingsError, match=said):
        read_assignments(["clients=20", "fedproto"])


GOOD = """
FedProto (Tan et al., AAAI 2022)
samples: 5,000 found · 300 for training (train-samples = 30 a client) · 4,700 for testing · none left out
round 1/2  loss 2.200  ↑4.8 MB ↓4.8 MB  2.8s, 2.8s to go
FedProto: round 2/2  loss 2.100  ↑4.8 MB ↓4.8 MB  2.8s, 0.0s to go
┏━━━━━━━━━━━━━┓
result: alone 36.0 %, FedAvg 62.0 %, FedProto 68.0 %; 96.5 MB exchanged
results: /runs/mine
report: /runs/mine/report.html
""".splitlines()
OURS = GOOD[1:6]
RESULT = [*GOOD[6:9], "next: protofl list"]


def seen(lines: list[str], capsys: pytest.CaptureFixture[str], **how: Any) -> list[str]:
    with Screen(**how) as screen:
        for line in lines:
            screen(line)
    if lines is GOOD:
        screen.conclude("protofl list")
    return capsys.readouterr().out.splitlines()


def test_a_good_run_shows_what_is_ours_and_quietly_the_result_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (seen(GOOD, capsys), seen(GOOD, capsys, quiet=True)) == (OURS + RESULT, RESULT)
    dumb = Console(
        force_terminal=True,
        no_color=True,
        soft_wrap=True,
        highlight=False,
        _environ={"TERM": "dumb"},
    )
    assert seen(GOOD[:6], capsys, console=dumb) == OURS


def test_quiet_shows_doubts_too_and_keeps_what_a_failure_refers_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    doubt = "warning: accuracy by head is 50.0 %, no better than a guess"
    assert seen([*GOOD[:6], doubt], capsys, quiet=True) == []
    screen = Screen(quiet=True)
    for line in [*(f"line {number}" for number in range(50)), doubt]:
        screen(line)
    screen.conclude("")
    assert capsys.readouterr().out == f"{doubt}\n"
    assert [*screen.recent][-2:] == ["line 49", doubt]


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_has_one_live_line_and_a_box(no_color: bool) -> None:
    console = Console(force_terminal=True, width=100, no_color=no_color, highlight=False)
    with console.capture() as captured, Screen(console=console) as screen:
        for line in GOOD:
            screen(line)
        screen.conclude("protofl list")
    shown = captured.get()
    assert shown.count("╭") == shown.count("╰") == 1
    assert "alone 36.0 %" in shown.partition("╭")[2]
    assert ("\x1b[32m" in shown) != no_color
    assert all(line in shown for line in (OURS[0], OURS[4]))
