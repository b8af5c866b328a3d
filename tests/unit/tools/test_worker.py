"""``protofl worker``: which tasks it takes, whose settings and modules count, and where results go."""

import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResultStatus

from protofl_common.experiment.settings import default_run_config, digest_of
from protofl_common.tools.cli import main, worker
from protofl_common.tools.executor import Executor
from tests.support.given import Patch, Printed

OPTIONS = ["worker", "--runtime-api-address", "127.0.0.1:1"]


def specification(kind: TaskType, authority: str | None = None) -> ExecutionSpec:
    return ExecutionSpec(
        kind, "127.0.0.1:1", "token", authority is None, authority, True, 1, False, 1
    )


def undo_the_commands_variables(monkeypatch: Patch) -> None:
    """Let ``monkeypatch`` restore the variables that the command sets for the life of its process."""
    for variable in ("PYTHONPATH", "no_proxy", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"):
        monkeypatch.setenv(variable, "")


@pytest.fixture
def executor(monkeypatch: Patch, tmp_path: Path) -> Executor:
    used: list[Executor] = []
    monkeypatch.setattr("sys.argv", [])
    undo_the_commands_variables(monkeypatch)
    monkeypatch.setattr(
        "flwr.supercore.cli.flower_superexec", lambda: used.append(run_superexec.get_executor())
    )  # type: ignore[attr-defined, call-arg]
    out_dir = str(tmp_path / "made" / "runs")
    assert (
        main(
            [
                *OPTIONS,
                "--root-certificates",
                __file__,
                "--out-dir",
                out_dir,
                "--allow-python",
                "mynets",
            ]
        )
        == 0
    )
    assert sys.argv == ["flower-superexec", *OPTIONS[1:], "--root-certificates", __file__]
    return used[0]


def test_a_worker_takes_server_apps_only_in_its_folder(
    executor: Executor, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr("subprocess.Popen", started := MagicMock())
    assert executor.get_eligible_capacity(set(TaskType), insecure=True) == (
        {TaskType.SERVER_APP},
        set(),
    )
    for kind in set(TaskType) - {TaskType.SERVER_APP}:
        assert executor.launch(specification(kind)).status == LaunchResultStatus.FAILED
    assert not started.called
    assert (
        executor.launch(specification(TaskType.SERVER_APP, "ca.crt")).status
        == LaunchResultStatus.ACCEPTED
    )
    (command,) = started.call_args.args
    assert command[-1] == "--root-certificates=ca.crt"
    assert not {"--insecure", "--allow-runtime-dependency-installation"} & {*command}
    out_dir = tmp_path / "made" / "runs"
    assert executor.command[2:] == [worker.__file__, str(out_dir), "mynets"]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (out_dir, out_dir.parent)} == {0o700}


def test_a_runs_settings_count_but_for_its_folder_and_nothing_of_its_bundle() -> None:
    with worker.installed_code("/results"):
        read = vars(import_module(worker.RUNTIME))
        assert read["install_from_fab"](b"no zip", skip_prompt=True) is None
        folder = read["get_project_dir"](*read["get_fab_metadata"](b"no zip"), "hash")
        config = read["get_fused_config_from_dir"](folder, {"lr": 0.5, "out-dir": "/etc"})
    assert config == default_run_config() | {"lr": 0.5, "out-dir": "/results"}
    assert (
        digest_of(config)
        == digest_of(config | {"out-dir": "/etc"})
        != digest_of(config | {"lr": 0.6})
    )


NAMED = """
import sys, threading
from protofl_common.config.python_names import allow_only, check_allowed
from protofl_common.experiment.node import allow_named
def ask(config):
    allow_named(config)
    for key, name in config.items():
        try:
            check_allowed((key, name))
        except Exception as error:
            print(error)
allow_only(["mynets"])
ask({"callback": "shutil:rmtree", "dataset": "mynets.data:make"})
threading.Thread(target=ask, args=({"dataset": "mynetsx:make"},)).start()
"""


def test_a_run_names_no_module_that_the_operator_did_not() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", NAMED], capture_output=True, text=True, check=True
    ).stdout
    first, second = printed.splitlines()
    refused = (
        "not allowed at this server; its operator may name {} in protofl worker --allow-python"
    )
    assert first == f"callback = 'shutil:rmtree': {refused.format('shutil')}"
    assert second == f"dataset = 'mynetsx:make': {refused.format('mynetsx')}"


@pytest.mark.parametrize(("options", "reason"), [
    (["--out-dir", __file__], "is no folder that this user can write to"),
    (["--allow-python", "mynets:Net"], "--allow-python mynets:Net: must be names of modules"),
])  # fmt: skip
def test_an_option_that_cannot_work_is_named(
    options: list[str], reason: str, capsys: Printed
) -> None:
    assert main([*OPTIONS, *options]) == 1
    assert reason in capsys.readouterr().err


def test_another_version_of_flower_ends_the_worker_and_not_each_run(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.delattr(import_module(worker.RUNTIME), "install_from_fab")
    undo_the_commands_variables(monkeypatch)
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(AttributeError, match="install_from_fab"):
        main([*OPTIONS, "--insecure", "--out-dir", str(tmp_path / "runs")])
