"""What part of a GPU a client gets, by what an `nvidia-smi` of ours says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protofl_common.tools.cli import gpus
from protofl_common.tools.cli.gpus import KEY, with_gpu

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with so many CPUs, whose `nvidia-smi` answers this."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(answer: str, cpus: int = 16, status: int = 0) -> None:
        gpus.gpu_part.cache_clear()
        gpus._say.cache_clear()
        monkeypatch.setattr("os.cpu_count", lambda: cpus)
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\nprintf '{answer}'\nexit {status}\n")
        program.chmod(0o755)

    yield make
    gpus.gpu_part.cache_clear()


@pytest.mark.parametrize(
    ("answer", "cpus", "part"),
    [
        ("NVIDIA H100, 80000\\n", 16, 0.125),  # the most at a time
        ("NVIDIA H100, 80000\\n", 2, 0.5),  # as many as there are CPUs
        ("Some GPU, 12500\\n", 16, 0.25),  # as many as fit
        ("Some GPU, 1500\\n", 16, 1.0),  # at least one
        ("A, 40000\\nB, 7000\\n", 16, 0.5),  # the fuller one decides
        ("A, 40000\\nA, 40000\\n", 8, 0.25),
    ],
)
def test_as_many_clients_share_a_gpu_as_fit(
    answer: str, cpus: int, part: float, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(answer, cpus)
    federation = {"num-supernodes": 10, "client-resources-num-cpus": 1}
    assert with_gpu(federation, "auto") == federation | {KEY: part}
    assert with_gpu(federation, "auto") == federation | {KEY: part}
    said = capsys.readouterr().err
    assert said.count("at a time") == 1
    assert f"{round(1 / part)} clients at a time" in said
    assert "--gpus 0" in said


@pytest.mark.parametrize(("answer", "status"), [("", 0), ("No devices were found\\n", 6), ("A, [N/A]\\n", 0)])
def test_a_machine_without_a_usable_gpu_changes_nothing(answer: str, status: int, machine: Machine) -> None:
    machine(answer, status=status)
    assert with_gpu({"num-supernodes": 2}, "auto") == {"num-supernodes": 2}


def test_nor_is_there_any_where_none_is_wanted_or_seen(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("NVIDIA H100, 80000\\n")
    assert with_gpu({}, "cpu") == {}
    assert with_gpu({KEY: 0}, "auto") == {KEY: 0}
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("PATH", "/nowhere")):
        gpus.gpu_part.cache_clear()
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert with_gpu({}, "auto") == {}
    gpus.gpu_part.cache_clear()
    monkeypatch.setattr(gpus, "version", lambda package: "2.15.0+cpu")
    assert with_gpu({}, "auto") == {}


def test_only_those_are_asked_for_that_clients_will_see(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine("NVIDIA H100, 80000\\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with_gpu({}, "auto")
    assert "--id=2,3" in (tmp_path / "asked").read_text()
