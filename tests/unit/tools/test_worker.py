"""``protofl worker``: its tasks, whose settings and modules count, and where results go."""

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import LaunchResultStatus

from protofl_common.experiment.settings import app_folder, default_run_config, digest_of
from protofl_common.tools.cli import main, worker
from protofl_common.tools.executor import Executor
from protofl_common.tools.resuming import Resuming
from protofl_common.tools.site.supernode import CLIENT_PROCESS
from tests.support.fakes import task
from tests.support.processes import output_of, wait_until

RUNTIME = "flwr.superlink.runtime.run_serverapp"
OPTIONS = ["worker", "--runtime-api-address", "127.0.0.1:1"]


@pytest.fixture(autouse=True)
def _variables_of_the_command(monkeypatch):
    """Let ``monkeypatch`` restore what the command sets for the life of its process."""
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr(Resuming, "start", lambda resuming: None)
    for variable in ("PYTHONPATH", "no_proxy", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"):
        monkeypatch.setenv(variable, "")


@pytest.fixture
def executor(monkeypatch, tmp_path):
    """The executor with which ``protofl worker`` lets Flower's SuperExec start tasks.

    Flower is given its own options only.
    """
    executors = []

    def flower_superexec():
        executors.append(run_superexec.get_executor())

    monkeypatch.setattr("flwr.supercore.cli.flower_superexec", flower_superexec)
    flowers = ["--root-certificates", __file__]
    ours = ["--out-dir", str(tmp_path / "made" / "runs"), "--allow-python", "mynets"]
    assert main([*OPTIONS, *flowers, *ours]) == 0
    _worker, *of_both = OPTIONS
    assert sys.argv == ["flower-superexec", *of_both, *flowers]
    return executors[0]


def test_a_worker_takes_server_apps_only_in_its_folder(executor, monkeypatch, tmp_path):
    """Other tasks fail; the process of one has the folder for results, closed to others."""
    started = MagicMock()
    monkeypatch.setattr("subprocess.Popen", started)

    assert executor.forking is None

    capacity = executor.get_eligible_capacity(set(TaskType), insecure=True)
    assert capacity == ({TaskType.SERVER_APP}, set())
    for kind in set(TaskType) - {TaskType.SERVER_APP}:
        assert executor.launch(task(kind)).status == LaunchResultStatus.FAILED
    assert not started.called

    launched = executor.launch(task(TaskType.SERVER_APP, "ca.crt"))
    assert launched.status == LaunchResultStatus.ACCEPTED

    (command,) = started.call_args.args
    assert command == executor.command

    written = started.return_value.stdin.write.call_args_list
    arguments = json.loads("".join(call.args[0] for call in written))["arguments"]

    assert arguments[-1] == "--root-certificates=ca.crt"
    assert not {"--insecure", "--allow-runtime-dependency-installation"} & set(arguments)

    out_dir = tmp_path / "made" / "runs"
    assert executor.command[2:] == [worker.__file__, str(out_dir), "mynets", executor.method]
    for folder in (out_dir, out_dir.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_runs_settings_count_but_for_its_folder_and_nothing_of_its_bundle():
    """Flower's functions for a bundle return the installed app; ``out-dir`` is the operator's."""
    with worker.installed_code("/results"):
        flower = import_module(RUNTIME)
        assert flower.install_from_fab(b"no zip", skip_prompt=True) is None
        folder = flower.get_project_dir(*flower.get_fab_metadata(b"no zip"), "hash")
        asked = {"lr": 0.5, "out-dir": "/etc"}
        config = flower.get_fused_config_from_dir(folder, asked)

    assert config == default_run_config() | {"lr": 0.5, "out-dir": "/results"}
    assert digest_of(config) == digest_of(config | {"out-dir": "/etc"})
    assert digest_of(config) != digest_of(config | {"lr": 0.6})


NAMED = """
import sys, threading
from protofl_common.config.python_names import allow_only, check_allowed, module_of
from protofl_common.experiment.node import allow_named
def ask(config):
    allow_named(config)
    for key, name in config.items():
        try:
            check_allowed([(f"{key} = {name!r}", module_of(name))])
        except Exception as error:
            print(error)
allow_only(["mynets"])
ask({"callback": "shutil:rmtree", "dataset": "mynets.data:make"})
threading.Thread(target=ask, args=({"dataset": "mynetsx:make"},)).start()
"""


def test_a_run_names_no_module_that_the_operator_did_not():
    """The operator has named mynets, under which mynets.data lies, but not mynetsx."""
    printed = output_of([sys.executable, "-c", NAMED])

    def refusal(module):
        operator = f"its operator may name {module} in protofl worker --allow-python"
        return f"not allowed at this server; {operator}"

    assert printed.splitlines() == [
        f"callback = 'shutil:rmtree': {refusal('shutil')}",
        f"dataset = 'mynetsx:make': {refusal('mynetsx')}",
    ]


READS_A_TASK = """
import os, sys, time
for line in sys.stdin:
    if sys.argv[2] == "spawn" or os.fork() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(line)
        time.sleep(60)
"""


def processes_of(word):
    """Return the folders in /proc of all processes that have this in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if word.encode() in (process / "cmdline").read_bytes():
                found.append(process)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("method", "number"), [("fork", 2), ("spawn", 1)])
def test_no_process_shows_the_token_of_its_task(method, number, tmp_path):
    """Anybody on the machine may read command lines.

    ``number``: processes of a task; where they are forked there is the one that forks as well.
    """
    read = tmp_path / "read"
    executor = Executor(TaskType.SERVER_APP, ["-c", READS_A_TASK, str(read), method], method)
    executor.reconcile()
    secret = dataclasses.replace(task(TaskType.SERVER_APP), token="a-secret-token")

    assert executor.launch(secret).status == LaunchResultStatus.ACCEPTED

    wait_until(lambda: read.exists() and read.read_text().endswith("\n"), timeout=60, pause=0.05)

    assert "--token=a-secret-token" in json.loads(read.read_text())["arguments"]

    started = processes_of(str(read))
    try:
        assert len(started) == number
        for process in started:
            assert b"secret-token" not in (process / "cmdline").read_bytes()
            assert b"secret-token" not in (process / "environ").read_bytes()
    finally:
        for process in started:
            os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments"), [
    (CLIENT_PROCESS, [str(app_folder()), "spawn"]),
    (worker.__file__, ["OUT-DIR", "mynets", "fork"]),
    (worker.__file__, ["OUT-DIR", "mynets", "spawn"]),
])  # fmt: skip
def test_the_process_of_a_task_reads_its_arguments(script, arguments, tmp_path):
    """Arguments come as a line on standard input; with --help the process prints its options."""
    arguments = [argument.replace("OUT-DIR", str(tmp_path)) for argument in arguments]
    command = [sys.executable, "-P", str(script), *arguments]
    env = os.environ | {"PYTHONPATH": str(app_folder())}

    soon = time.time() + 600  # however long this machine needs to start a process
    task = json.dumps({"launched": soon, "arguments": ["--help"]})
    done = subprocess.run(command, input=task, capture_output=True, text=True, env=env)

    assert done.stderr == ""
    assert done.returncode == 0
    assert "--runtime-api-address" in done.stdout


def test_a_process_that_ends_before_it_reads_its_task_is_named():
    """The process that would fork is an empty program."""
    executor = Executor(TaskType.SERVER_APP, ["-Sc", ""], "fork")
    executor.reconcile()

    executor.forking.wait()

    failed = executor.launch(task(TaskType.SERVER_APP))

    assert failed.status == LaunchResultStatus.FAILED
    assert "ended before it had read the task" in str(failed.message)


@pytest.mark.parametrize(("options", "reason"), [
    (["--out-dir", __file__], "is no folder that this user can write to"),
    (["--allow-python", "mynets:Net"], "--allow-python mynets:Net: must be names of modules"),
])  # fmt: skip
def test_an_option_that_cannot_work_is_named(options, reason, capsys):
    assert main([*OPTIONS, *options]) == 1
    assert reason in capsys.readouterr().err


def test_another_version_of_flower_ends_the_worker_and_not_each_run(monkeypatch, tmp_path, capsys):
    """A function that the worker replaces is not there."""
    monkeypatch.delattr(import_module(RUNTIME), "install_from_fab")
    assert main([*OPTIONS, "--insecure", "--out-dir", str(tmp_path / "runs")]) == 1

    said = capsys.readouterr().err
    assert f"Flower {version('flwr')} lacks a name that ProtoFL needs: " in said
    assert "'flwr.superlink.runtime.run_serverapp' has no attribute 'install_from_fab'" in said
