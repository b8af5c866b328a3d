"""The engine in this process.

The same figures however many processes work, clear ends, nothing left running.
"""

import gc
import os
import signal
import sys
from multiprocessing import active_children
from types import SimpleNamespace
from weakref import ref

import pytest

import client_app.app
from protofl_common.runs.events import Failed
from protofl_common.simulation import grid, machine
from protofl_common.simulation.grid import attempt, simulate
from protofl_common.simulation.machine import CPUS, GPUS, visible_gpus, workers_for
from protofl_common.simulation.pool import pool
from tests.support.harness import run_config
from tests.support.results import left_by

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """End the processes of the pool, which else serve all simulations of this process."""
    yield
    for process in active_children():
        process.kill()
        process.join()
    pool.cache_clear()


def results_of_run(folder, workers, **changes):
    """Simulate three clients in so many processes.

    Return the rows of the run, without times, and a digest of each tensor that it leaves. The
    collector of garbage works as before, and has worked.
    """
    garbage = ref(type("Garbage", (), {}))  # a class refers to itself
    settings = {"dataset": "digits", "partition": "iid", "run_name": "mine"} | changes
    run = folder / "runs" / "mine"

    assert simulate(run_config(folder, **settings), 3, lambda event: None, workers) == run

    assert gc.get_freeze_count() == 0
    assert garbage() is None
    return left_by(run)


@linux
@pytest.mark.parametrize("algo", ["fedproto", "fedtgp", "fedavg"])
def test_figures_do_not_depend_on_the_number_of_processes(algo, tmp_path):
    rows, tensors = results_of_run(tmp_path / "1", 1, algo=algo, models="cnn4")
    assert len(rows) == 3  # two rounds and the final evaluation
    assert tensors
    assert results_of_run(tmp_path / "2", 2, algo=algo, models="cnn4") == (rows, tensors)


@linux
def test_a_process_that_dies_ends_the_run_and_it_can_be_resumed(tmp_path, monkeypatch):
    """A process is killed while it trains site-1 in round 2; resumed, the run leaves the same."""
    fit = client_app.app.fit

    def dying(algorithm):
        if algorithm.client.name == "site-1" and algorithm.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return fit(algorithm)

    settings = {"algo": "fedproto", "models": "cnn4"}
    whole = results_of_run(tmp_path / "whole", 2, **settings)
    for process in active_children():  # new ones inherit what is patched below
        process.kill()
    pool.cache_clear()

    monkeypatch.setattr("client_app.app.fit", dying)
    with pytest.raises(OSError, match="a process that simulates clients has died"):
        results_of_run(tmp_path / "cut", 2, **settings)

    monkeypatch.undo()

    assert results_of_run(tmp_path / "cut", 2, **settings, resume=True) == whole


@linux
def test_the_processes_are_there_before_a_run_begins(monkeypatch):
    """On four CPUs there are two processes for clients of two CPUs, and one for larger clients."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    assert workers_for({CPUS: 2}, "cpu") == 2
    assert len(active_children()) == 2
    assert workers_for({CPUS: 8}, "cpu") == 1


def test_an_error_of_ones_own_code_shows_its_traceback(tmp_path, monkeypatch):
    """An error while the server merges ends the run: its reason is a line, its text a traceback."""

    def broken(*_):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr("server_app.strategies.fedproto.FedProto.merge", broken)
    events = []
    config = run_config(tmp_path, dataset="digits", partition="iid")
    ended = attempt(config, {"num-supernodes": 1}, events.append)

    assert isinstance(ended, Failed)
    assert ended is events[-1]
    assert ended.reason == "failed: ZeroDivisionError: mine"
    assert "in broken" in str(ended)


def test_a_wrong_setting_is_the_reason_itself(tmp_path):
    """The error of a setting is shown to people without a traceback."""
    said = "rounds = 0: must be a whole number at least 1"
    events = []
    ended = attempt(run_config(tmp_path, rounds=0), {"num-supernodes": 1}, events.append)

    assert ended == Failed("SettingsError", said)
    assert ended.reason == said
    assert events == [ended]
    assert str(ended) == f"\nprotofl: this run cannot go on\n{said}\n"


@pytest.fixture
def machine_with(tmp_path, monkeypatch):
    """Return a function that makes this a machine with so many CPUs and a `nvidia-smi`.

    The program prints ``answer``, ends with ``status``, and notes in a file what it was asked.
    """
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.2")
    monkeypatch.setattr(machine, "pool", lambda workers: None)
    monkeypatch.setattr(sys, "platform", "linux")

    def make(answer, cpus=16, status=0):
        visible_gpus.cache_clear()
        machine._say.cache_clear()
        monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cpus), raising=False)
        program = tmp_path / "nvidia-smi"
        program.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/asked
printf '{answer}'
exit {status}
""")
        program.chmod(0o755)

    return make


@pytest.mark.parametrize(("answer", "cpus", "part", "clients"), [
    ("NVIDIA H100, 80000\\n", 16, None, 8),  # the most at a time
    ("NVIDIA H100, 80000\\n", 2, None, 2),  # as many as there are CPUs
    ("Some GPU, 12500\\n", 16, None, 4),  # as many as fit
    ("Some GPU, 1500\\n", 16, None, 1),  # at least one
    ("A, 40000\\nB, 7000\\n", 16, None, 4),  # the fuller one decides
    ("A, 40000\\nA, 40000\\n", 8, None, 8),
    ("NVIDIA H100, 80000\\n", 16, 0.25, 4),  # as the command line says
    ("A, 40000\\nA, 40000\\n", 16, 1, 2),
    ("A, 40000\\nA, 40000\\n", 16, 2, 1),
])  # fmt: skip
def test_as_many_clients_share_a_gpu_as_fit(answer, cpus, part, clients, machine_with, capsys):
    """``answer`` has the name and free MiB of each GPU; ``part`` is what each client gets of one.

    How many clients work at a time is said once.
    """
    machine_with(answer, cpus)
    federation = {CPUS: 1} if part is None else {CPUS: 1, GPUS: part}

    for _ in range(2):
        assert workers_for(federation, "auto") == clients

    said = capsys.readouterr().err
    assert said.count("--gpus 0") == 1
    assert f"clients at a time: {clients};" in said


def test_a_machine_without_a_usable_gpu_changes_nothing(machine_with):
    """As many clients work at a time as the machine has CPUs."""
    for answer, status in (("", 0), ("No devices were found\\n", 6), ("A, [N/A]\\n", 0)):
        machine_with(answer, status=status)
        assert workers_for({}, "auto") == 16
        assert workers_for({GPUS: 0.5}, "auto") == 16


def test_clients_that_shall_have_no_gpu_see_none(machine_with, monkeypatch):
    machine_with("NVIDIA H100, 80000\\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    assert workers_for({GPUS: 0}, "auto") == 16
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_nvidia_smi_is_asked_only_for_gpus_that_clients_will_see(
    machine_with, monkeypatch, tmp_path
):
    """With the GPUs 2 and 3 visible, ``cuda:1`` is the second of these."""
    machine_with("A, 80000\\nB, 7000\\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")

    assert visible_gpus("cuda:1") == [("B", 7000)]
    assert "--id=2,3" in (tmp_path / "asked").read_text()


def test_a_gpu_that_is_not_wanted_or_seen_changes_nothing(machine_with, monkeypatch):
    """Clients on the CPU, no visible GPU, no `nvidia-smi`, or a PyTorch without CUDA."""
    machine_with("NVIDIA H100, 80000\\n")
    assert workers_for({}, "cpu") == 16

    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("PATH", "/nowhere")):
        visible_gpus.cache_clear()
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert workers_for({}, "auto") == 16

    visible_gpus.cache_clear()
    monkeypatch.setattr("torch.version.cuda", None)

    assert workers_for({}, "auto") == 16


def test_the_processes_divide_several_gpus_among_them(monkeypatch):
    """Each process takes a GPU in turn as PyTorch's current device, which ``cuda`` then means.

    The main process, and clients on the CPU, take none.
    """
    taken = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr(client_app.app, "app", lambda message, context: message)
    message = SimpleNamespace(metadata=SimpleNamespace(dst_node_id=1))

    process = SimpleNamespace()
    monkeypatch.setattr(grid, "current_process", lambda: process)
    for identity in ((), (1,), (2,), (3,)):  # the main process, and three of the pool
        process._identity = identity
        grid.answer(message, 1, {}, {"device": "auto"})
        grid.answer(message, 1, {}, {"device": "cpu"})

    assert taken == [1, 0, 1]  # by the processes 1, 2 and 3, each once
