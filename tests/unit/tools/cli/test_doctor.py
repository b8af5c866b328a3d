"""``protofl doctor``: each planted fault is found, and its cure is named."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from protofl_common.tools.cli import doctor, main
from tests.support.commands import output
from tests.support.given import Patch, Printed

Plant = Callable[[Patch, Path], list[str]]
"""Plants a fault; returns what to ask the doctor."""


def attribute(name: str, value: object) -> Plant:
    """Another value of something of the doctor's module."""

    def plant(patch: Patch, folder: Path) -> list[str]:
        patch.setattr(doctor, name, value)
        return []

    return plant


def asked(*words: str) -> Plant:
    return lambda patch, folder: [word.replace("FOLDER", str(folder)) for word in words]


def no_torch(patch: Patch, folder: Path) -> list[str]:
    patch.setitem(sys.modules, "torch", None)
    return []


def another_flower(patch: Patch, folder: Path) -> list[str]:
    patch.delattr("flwr.supernode.runtime.run_clientapp.push_task_output")
    return []


def written(name: str, text: str, *words: str, **places: str) -> Plant:
    """A file in FOLDER; ``places``: where in it the doctor looks for something of the machine."""

    def plant(patch: Patch, folder: Path) -> list[str]:
        (folder / name).write_text(text)
        for attribute, path in places.items():
            patch.setattr(doctor, attribute, folder / path)
        return asked(*words)(patch, folder)

    return plant


DISK = SimpleNamespace(total=10**8, free=10**7)
SMALL_DISK = attribute("shutil", SimpleNamespace(disk_usage=lambda path: DISK))
PS = """    1     0 init
 4711     1 /usr/bin/python /env/bin/flower-superlink --insecure --simulation
 4713     1 /usr/bin/python /env/bin/flower-superlink --ssl-keyfile key
 4712     1 /x/raylet -a
"""
LEFT_RUNNING = attribute(
    "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=PS))
)
MEMORY = "MemTotal: 9000000 kB\nMemAvailable: 300000 kB\n"
BAD_DATA = ("dataset=arrays", "data-dir=FOLDER/bad.csv", "cache-dir=FOLDER")
PATIENTS = "a,label,client,split\n1,x,P,train\n2,y,P,test\n3,y,Q,train\n4,x,Q,test\n"
OF_PATIENTS = ("dataset=arrays", "data-dir=FOLDER/p.csv", "cache-dir=FOLDER")
BOTH_SIDES = "both trained on and tested"
CORRECT = "correct that setting"
FAULTS: dict[str, tuple[Plant, str, str, str]] = {
    "an old Flower": (attribute("requires", lambda name: ["flwr<1.0"]),
        "wrong", "is not <1.0", "-m pip install 'flwr<1.0'"),
    "a package that is missing": (attribute("requires", lambda name: ["nonesuch>=2"]),
        "wrong", "nonesuch is not installed", "install 'nonesuch>=2'"),
    "no Flower commands": (attribute("BIN", Path("/none")),
        "wrong", "flower-superlink is not in /none", "force-reinstall flwr"),
    "a Flower that lacks a name": (another_flower,
        "wrong", "has no attribute 'push_task_output'", "install flwr=="),
    "a broken PyTorch": (no_torch,
        "wrong", "PyTorch cannot be loaded", "force-reinstall torch"),
    "no GPU": (asked("device=cuda:99"),
        "wrong", "device = 'cuda:99': PyTorch", "take device=cpu"),
    "no memory": (written("meminfo", MEMORY, PROC=""),
        "wrong", ", 0.3 GB free", "--cpus"),
    "a folder that cannot be written": (written("runs", "", "out-dir=FOLDER/runs"),
        "wrong", "cannot be written", "out-dir=FOLDER"),
    "a full disk": (SMALL_DISK,
        "warning", "10 MB free", "out-dir=FOLDER on another disk"),
    "little shared memory": (SMALL_DISK,
        "warning", "100 MB of shared memory", "--shm-size=1g"),
    "no data": (asked("dataset=image-folder", "data-dir=FOLDER/none"),
        "wrong", "there is no such folder", CORRECT),
    "data that cannot be read": (written("bad.csv", "a,label\n1,x\nfoo,y\n", *BAD_DATA),
        "wrong", "bad.csv, line 3, column 'a': 'foo' is not a finite number", CORRECT),
    "patients on both sides": (
        written("p.csv", PATIENTS, *OF_PATIENTS, "test-from=official-own", "--clients", "1"),
        "warning", f"2 values of `client` are {BOTH_SIDES}", "mend `split`"),
    "another number of clients": (
        written("p.csv", PATIENTS, *OF_PATIENTS, "partition=natural", "--clients", "1"),
        "wrong", "the data name 2 clients, not 1", CORRECT),
    "a wrong setting": (asked("lr=fast"),
        "wrong", "lr = 'fast': must be a number above 0", CORRECT),
    "a SuperLink left": (LEFT_RUNNING,
        "warning", "flower-superlink (4711) is left", "kill 4711"),
    "a Ray left": (LEFT_RUNNING,
        "warning", "raylet (4712) is left", "kill 4712"),
    "a note of a cluster": (
        written("ray_current_cluster", "10.0.0.1:6379", RAY_NOTE="ray_current_cluster"),
        "warning", "plain `flwr run` waits", "ray stop, or rm"),
}  # fmt: skip
"""Name -> (how it is planted, the level of the finding, part of its text, part of its cure)."""


@pytest.fixture(autouse=True)
def well(monkeypatch: Patch, tmp_path: Path) -> None:
    """What this machine itself may have of such faults does not count."""
    monkeypatch.setattr(doctor, "RAY_NOTE", tmp_path / "none")


def findings(capsys: Printed, *words: str) -> tuple[int, list[dict[str, str]]]:
    """The exit status and what is found."""
    status = main(["doctor", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_with_a_cure(
    fault: str, monkeypatch: Patch, tmp_path: Path, capsys: Printed
) -> None:
    plant, level, text, cure = FAULTS[fault]
    _, before = findings(capsys)
    assert not [finding for finding in before if text in finding["text"]]

    with monkeypatch.context() as patch:
        status, after = findings(capsys, *plant(patch, tmp_path))

    finding = next(finding for finding in after if text in finding["text"])
    assert finding["level"] == level
    assert cure in finding["cure"]
    assert "4713" not in str(after)  # a SuperLink that simulates nothing may be a service
    if level == "wrong":
        assert status == 1


def test_what_is_wrong_stands_first_with_its_cure_below(capsys: Printed) -> None:
    wrong, cure, *_ = output(capsys, "doctor", "lr=fast", status=1).out.splitlines()
    assert wrong == "WRONG   settings      lr = 'fast': must be a number above 0"
    assert cure == f"{'':22}do: correct that setting; protofl list shows choices"


def test_a_wrong_option_and_a_wrong_key_of_a_recipe_are_named(
    capsys: Printed, tmp_path: Path
) -> None:
    assert "--clients 0: must be" in output(capsys, "doctor", "--clients", "0", status=1).err

    recipe = tmp_path / "mine.toml"
    recipe.write_text("[fedproto]\nlamda = 2.0\n")
    printed = output(capsys, "doctor", "--recipe", recipe, status=1).out
    wrong = "WRONG   settings      fedproto.lamda: unknown key; did you mean fedproto.lambda?\n"
    assert printed.startswith(wrong)


def test_patients_are_not_on_both_sides_where_their_column_means_sites(
    capsys: Printed, monkeypatch: Patch, tmp_path: Path
) -> None:
    words = ["test-from=official-own", "--clients", "2", "partition=feature-shift"]
    plant = written("p.csv", PATIENTS, *OF_PATIENTS, *words)
    _, found = findings(capsys, *plant(monkeypatch, tmp_path))
    assert BOTH_SIDES not in str(found)


def test_a_check_that_fails_hides_no_other(monkeypatch: Patch, capsys: Printed) -> None:
    def fails(*_: object, **__: object) -> None:
        raise FileNotFoundError("ps")

    monkeypatch.setattr(doctor, "subprocess", SimpleNamespace(run=fails))
    _, found = findings(capsys)

    (of_processes,) = [finding for finding in found if finding["topic"] == "processes"]
    assert of_processes["text"] == "cannot be told here (FileNotFoundError('ps'))"
    assert {"versions", "torch", "memory"} <= {finding["topic"] for finding in found}


def test_a_fault_of_its_own_is_wrong(monkeypatch: Patch, capsys: Printed) -> None:
    def fails(*_: object) -> None:
        raise KeyError("")

    monkeypatch.setattr(doctor, "check_settings", fails)
    status, found = findings(capsys)
    assert status == 1
    (fault,) = [finding for finding in found if finding["topic"] == "settings"]
    assert fault["text"].startswith("a fault of ProtoFL: KeyError('') in ")
    assert "test_doctor.py, line" in fault["text"]
