"""``protofl run``: its exact command, and errors before anything starts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from protofl_common.config.options import SettingsError
from protofl_common.tools.cli import flower, main, run, superlink
from protofl_common.tools.cli.flower import Ended
from protofl_common.tools.cli.recipes import RECIPES, ROOT, federation_in, read_recipe

FLOWER = ("run", "--engine", "flower")


class FakeSuperLink:
    environment: ClassVar = {"FLWR_HOME": "/home of/flower"}

    def __init__(self, ray: str) -> None:
        assert not ray

    def __enter__(self) -> FakeSuperLink:
        return self

    def __exit__(self, *_: object) -> None:
        print("stopped")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have run."""
    seen: list[list[str]] = []

    def follow(command: list[str], superlink: FakeSuperLink, on_line: Callable[[str], None]) -> Ended:
        seen.append(command)
        on_line("a line of the run")
        return Ended("finished:failed" if 'run-name="bad"' in command[-1] else "finished:completed", ())

    monkeypatch.setattr(run, "SuperLink", FakeSuperLink)
    monkeypatch.setattr(run, "follow", follow)
    monkeypatch.chdir(ROOT)
    return seen


def test_bare_settings_become_flowers_command_and_it_is_shown(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLOWER, "algo=fedplvm", "--clients", "20", "rounds=20", "models=cnn4", "--verbose"]) == 0
    federation, config = "num-supernodes=20 client-resources-num-cpus=1", 'algo="fedplvm" rounds=20 models="cnn4"'
    wanted = ["flwr", "run", ".", "--stream", "--federation-config", federation, "--run-config", config]
    assert commands == [wanted]
    shown, *log = capsys.readouterr().out.splitlines()
    assert shlex.split(shown) == ["$", "env", "FLWR_HOME=/home of/flower", *wanted]
    assert log == ["a line of the run", "stopped"]


def test_without_settings_the_defaults_run_with_ten_clients(commands: list[list[str]]) -> None:
    assert main([*FLOWER]) == 0
    assert commands[0][4:] == ["--federation-config", "num-supernodes=10 client-resources-num-cpus=1"]


def test_a_recipe_alone_goes_as_a_file_with_the_clients_of_its_comment(commands: list[list[str]]) -> None:
    recipe = "configs/recipes/fedpcl-digits.toml"
    here = ROOT / "a recipe.toml"
    assert read_recipe("fedpcl-digits").federation["num-supernodes"] == 5
    assert not here.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "check_data_are_here", lambda settings: None)
        assert main([*FLOWER, "--recipe", recipe]) == 0
    assert commands[0][4:] == [
        "--federation-config",
        "num-supernodes=5 client-resources-num-cpus=1",
        "--run-config",
        recipe,
    ]


def test_a_recipe_with_settings_becomes_pairs_and_the_settings_win(commands: list[list[str]]) -> None:
    words = ["dataset=digits", "partition=iid", "test-from=split", "rounds=3", "--clients", "2", "--gpus", "0.5"]
    assert main([*FLOWER, "--recipe", "fedproto-mnist-3way", *words]) == 0
    federation, config = commands[0][5], commands[0][7]
    assert federation == "num-supernodes=2 client-resources-num-cpus=1 client-resources-num-gpus=0.5"
    assert "rounds=3" in config
    assert "rounds=100" not in config
    assert 'fedproto.distance="mse"' in config


def test_the_result_is_shown_before_the_superlink_has_stopped(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLOWER]) == 0
    assert capsys.readouterr().out.splitlines() == ["a line of the run", f"next: {run.NEXT}", "stopped"]


def test_own_data_are_read_before_anything_starts_and_nothing_is_said_of_own_data_then(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.npz"
    words = [*FLOWER, "dataset=arrays", "partition=iid", f"data-dir={file}", f"cache-dir={tmp_path / 'cache'}"]
    np.savez(file, x=np.ones((4, 3)), y=np.arange(4))
    assert main(words) == 1
    assert "mine.npz: has no 'inputs', only 'x', 'y'" in capsys.readouterr().err
    assert commands == []
    np.savez(file, inputs=np.ones((4, 3)), labels=np.arange(4))
    assert main(words) == 0
    assert "next:" not in capsys.readouterr().out


def test_a_failed_run_exits_with_1(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLOWER, "run-name=bad"]) == 1
    assert "this run has failed (finished:failed)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algo=fedx", "rounds=0"], ["algo = 'fedx': choose one of local,", "rounds = 0: must be a number at least 1"]),
        (["roundz=3"], ["roundz: unknown key; did you mean rounds?"]),
        (["dataset=mnist", "partition=iid", "data-dir=/nowhere"], ["data-dir = '/nowhere'"]),
        (
            ["partition=feature-shift", "dataset=digits"],
            ["partition = 'feature-shift': dataset 'digits' has no domains"],
        ),
        (["--recipe", "fedprotto"], ["recipe = 'fedprotto': no such file; choose", "fedproto-mnist-3way"]),
        (["--clients", "0"], ["--clients 0: must be at least 1"]),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(
    words: list[str], said: list[str], commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLOWER, *words]) == 1
    told = capsys.readouterr().err
    assert all(part in told for part in said), told
    assert commands == []


def test_ctrl_c_exits_with_130(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Ended:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "follow", interrupted)
    assert main([*FLOWER]) == 130


def test_the_reason_of_a_failure_is_what_our_server_said() -> None:
    said = ("protofl: this run cannot go on", "rounds = 0: must be more", "", "Exit Code: 200")
    assert Ended("finished:failed", said).reason == "rounds = 0: must be more"
    assert Ended("finished:failed", ("one", "\x1b[92mtwo\x1b[0m", "")).reason == "finished:failed: two"


def test_the_reason_is_kept_whatever_is_said_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "flwr"
    lines = ["protofl: this run cannot go on", "lr = 0: must be more", *(f"(pid={n}) Traceback" for n in range(200))]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setattr(flower, "BIN", tmp_path)
    started = SimpleNamespace(app=tmp_path, full_environment=dict(os.environ), alive=False)
    shown: list[str] = []
    ended = flower.follow(flower.flwr_run("", {}), started, shown.append)  # type: ignore[arg-type]
    assert (ended.well, ended.reason) == (False, "lr = 0: must be more")
    assert shown == lines


def test_as_many_clients_as_the_data_name(commands: list[list[str]], tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", inputs=np.ones((6, 3)), labels=[0, 1] * 3, client=["a", "a", "b", "b", "c", "c"])
    words = [*FLOWER, "dataset=arrays", f"data-dir={tmp_path / 'mine.npz'}", f"cache-dir={tmp_path / 'cache'}"]
    for more, number in (
        (["partition=natural"], 3),
        (["partition=iid"], 10),
        (["partition=natural", "--clients", "2"], 2),
    ):
        assert main([*words, *more]) == 0
        assert commands[-1][5].startswith(f"num-supernodes={number} ")


def test_every_recipe_says_its_federation() -> None:
    for path in RECIPES.glob("*.toml"):
        assert int(read_recipe(path.stem).federation["num-supernodes"]) > 1, path
    assert federation_in("algo = 'x'") == {"num-supernodes": 10, "client-resources-num-cpus": 1}


def test_a_recipe_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("algo = fedproto")
    with pytest.raises(SettingsError, match=r"bad.toml': not TOML"):
        read_recipe(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("shell", "number", "warned"),
    [("/bin/bash", 1001, True), ("/usr/sbin/nologin", 1001, False), ("/bin/sh", 33, False)],
)
def test_other_people_of_this_machine_are_named(
    shell: str, number: int, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    someone = SimpleNamespace(pw_name="jane\x1b", pw_uid=number, pw_shell=shell)
    monkeypatch.setattr("pwd.getpwall", lambda: [someone])
    started = superlink.SuperLink.__new__(superlink.SuperLink)
    monkeypatch.setattr(superlink.SuperLink, "_wait_until_healthy", lambda _: None)
    started.__enter__()
    assert (r"accounts on this machine (jane\x1b): while" in capsys.readouterr().err) == warned
