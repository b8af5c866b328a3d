"""``protofl worker``: its tasks, whose settings and modules count, and where results go."""

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


def task(kind: TaskType, authority: str | None = None) -> ExecutionSpec:
    insecure = authority is None
    return ExecutionSpec(kind, "127.0.0.1:1", "token", insecure, authority, True, 1, False, 1)


@pytest.fixture(autouse=True)
def _variables_of_the_command(monkeypatch: Patch) -> None:
    """Let ``monkeypatch`` restore what the command sets for the life of its process."""
    monkeypatch.setattr("sys.argv", [])
    for variable in ("PYTHONPATH", "no_proxy", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"):
        monkeypatch.setenv(variable, "")


@pytest.fixture
def executor(monkeypatch: Patch, tmp_path: Path) -> Executor:
    """The executor that Flower's SuperExec gets of a worker."""
    executors: list[Executor] = []

    def flower_superexec() -> None:
        executors.append(run_superexec.get_executor())  # type: ignore[attr-defined, call-arg]

    monkeypatch.setattr("flwr.supercore.cli.flower_superexec", flower_superexec)
    flowers = ["--root-certificates", __file__]
    ours = ["--out-dir", str(tmp_path / "made" / "runs"), "--allow-python", "mynets"]
    assert main([*OPTIONS, *flowers, *ours]) == 0
    assert sys.argv == ["flower-superexec", *OPTIONS[1:], *flowers]
    return executors[0]


def test_a_worker_takes_server_apps_only_in_its_folder(
    executor: Executor, monkeypatch: Patch, tmp_path: Path
) -> None:
    started = MagicMock()
    monkeypatch.setattr("subprocess.Popen", started)
    capacity = executor.get_eligible_capacity(set(TaskType), insecure=True)
    assert capacity == ({TaskType.SERVER_APP}, set())
    for kind in set(TaskType) - {TaskType.SERVER_APP}:
        assert executor.launch(task(kind)).status == LaunchResultStatus.FAILED
    assert not started.called

    launched = executor.launch(task(TaskType.SERVER_APP, "ca.crt"))
    assert launched.status == LaunchResultStatus.ACCEPTED
    (command,) = started.call_args.args
    assert command[-1] == "--root-certificates=ca.crt"
    assert not {"--insecure", "--allow-runtime-dependency-installation"} & set(command)

    out_dir = tmp_path / "made" / "runs"
    assert executor.command[2:] == [worker.__file__, str(out_dir), "mynets"]
    for folder in (out_dir, out_dir.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_runs_settings_count_but_for_its_folder_and_nothing_of_its_bundle() -> None:
    with worker.installed_code("/results"):
        flower = import_module(worker.RUNTIME)
        assert flower.install_from_fab(b"no zip", skip_prompt=True) is None
        folder = flower.get_project_dir(*flower.get_fab_metadata(b"no zip"), "hash")
        asked = {"lr": 0.5, "out-dir": "/etc"}
        config = flower.get_fused_config_from_dir(folder, asked)

    assert config == default_run_config() | {"lr": 0.5, "out-dir": "/results"}
    assert digest_of(config) == digest_of(config | {"out-dir": "/etc"})
    assert digest_of(config) != digest_of(config | {"lr": 0.6})


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
    command = [sys.executable, "-c", NAMED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    def refusal(module: str) -> str:
        operator = f"its operator may name {module} in protofl worker --allow-python"
        return f"not allowed at this server; {operator}"

    assert done.stdout.splitlines() == [
        f"callback = 'shutil:rmtree': {refusal('shutil')}",
        f"dataset = 'mynetsx:make': {refusal('mynetsx')}",
    ]


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
    with pytest.raises(AttributeError, match="install_from_fab"):
        main([*OPTIONS, "--insecure", "--out-dir", str(tmp_path / "runs")])
