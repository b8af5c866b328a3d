"""``protofl doctor``: each planted fault is found, and its cure is named."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from protofl_common.tools.cli import doctor, main
from tests.support.commands import output


def attribute(name, value):
    """Return a fault: another value of something in the doctor's module.

    A fault is a function that plants it and returns what to ask the doctor.
    """

    def plant(patch, folder):
        patch.setattr(doctor, name, value)
        return []

    return plant


def asked(*words):
    """Return a fault that lies in what the doctor is asked; FOLDER stands for the test's folder."""
    return lambda patch, folder: [word.replace("FOLDER", str(folder)) for word in words]


def no_torch(patch, folder):
    patch.setitem(sys.modules, "torch", None)
    return []


def another_flower(patch, folder):
    patch.delattr("flwr.supernode.runtime.run_clientapp.push_task_output")
    return []


def written(name, text, *words, **places):
    """Return a fault that lies in a file of FOLDER; the doctor is asked ``words``.

    ``places``: a constant of the doctor's module, such as PROC, -> its place in FOLDER.
    """

    def plant(patch, folder):
        (folder / name).write_text(text)
        for attribute, path in places.items():
            patch.setattr(doctor, attribute, folder / path)
        return asked(*words)(patch, folder)

    return plant


DISK = SimpleNamespace(total=10**8, free=10**7)
SMALL_DISK = attribute("shutil", SimpleNamespace(disk_usage=lambda path: DISK))
SIMULATES = "python /env/bin/flower-superlink --insecure --simulation"
LEFT = {  # process -> its parent, its words, its FLWR_HOME
    "4711": ("1", SIMULATES, "home"),
    "4712": ("1", "/x/raylet -a", "home"),
    "4713": ("1", "python /env/bin/flower-superlink --ssl-keyfile key", "home"),
    "4714": ("1", SIMULATES, "another"),
    "4715": ("4711", SIMULATES, "home"),
}


def left_running(patch, folder):
    """Write a folder /proc of processes, of which two are left in our FLWR_HOME.

    That are 4711 and 4712, whose parent is process 1: what started them has ended.
    """
    for number, (parent, words, home) in LEFT.items():
        process = folder / number
        process.mkdir()
        (process / "stat").write_text(f"{number} (a) b) S {parent} 1 1")
        (process / "cmdline").write_text(words.replace(" ", "\0"))
        (process / "environ").write_text(f"HOME=/root\0FLWR_HOME={folder / home}\0")
    (folder / "meminfo").write_text("MemAvailable: 90000000 kB\n")
    patch.setenv("FLWR_HOME", str(folder / "home"))
    patch.setattr(doctor, "PROC", folder)
    return []


MEMORY = "MemTotal: 9000000 kB\nMemAvailable: 300000 kB\n"
BAD_DATA = ("dataset=arrays", "data-dir=FOLDER/bad.csv", "cache-dir=FOLDER")
PATIENTS = "a,label,client,split\n1,x,P,train\n2,y,P,test\n3,y,Q,train\n4,x,Q,test\n"
OF_PATIENTS = ("dataset=arrays", "data-dir=FOLDER/p.csv", "cache-dir=FOLDER")
BOTH_SIDES = "both trained on and tested"
CORRECT = "correct that setting"
FAULTS = {
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
    "a SuperLink left": (left_running,
        "warning", "flower-superlink (4711) is left", "kill 4711"),
    "a Ray left": (left_running,
        "warning", "raylet (4712) is left", "kill 4712"),
    "a note of a cluster": (
        written("ray_current_cluster", "10.0.0.1:6379", RAY_NOTE="ray_current_cluster"),
        "warning", "plain `flwr run` waits", "ray stop, or rm"),
}  # fmt: skip
"""Name -> (how it is planted, the level of the finding, part of its text, part of its cure)."""


@pytest.fixture(autouse=True)
def well(monkeypatch, tmp_path):
    """Let the doctor see no note of a cluster that this machine itself may have."""
    monkeypatch.setattr(doctor, "RAY_NOTE", tmp_path / "none")


def findings(capsys, *words):
    """Return the doctor's exit status and its findings."""
    status = main(["doctor", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_with_a_cure(fault, monkeypatch, tmp_path, capsys):
    """The fault is not found before it is planted."""
    plant, level, text, cure = FAULTS[fault]
    _, before = findings(capsys)

    assert not [finding for finding in before if text in finding["text"]]

    with monkeypatch.context() as patch:
        status, after = findings(capsys, *plant(patch, tmp_path))

    finding = next(finding for finding in after if text in finding["text"])
    assert finding["level"] == level
    assert cure in finding["cure"]
    # a SuperLink that simulates nothing may be a service; others are somebody else's, or have ours
    assert not any(number in str(after) for number in ("4713", "4714", "4715"))
    if level == "wrong":
        assert status == 1


def test_what_is_wrong_stands_first_with_its_cure_below(capsys):
    wrong, cure, *_ = output(capsys, "doctor", "lr=fast", status=1).out.splitlines()
    assert wrong == "WRONG   settings      lr = 'fast': must be a number above 0"
    assert cure == f"{'':22}do: correct that setting; protofl list shows choices"


def test_a_wrong_option_and_a_wrong_key_of_a_recipe_are_named(capsys, tmp_path):
    """A key that differs in a letter from a known one is named with it."""
    assert "--clients 0: must be" in output(capsys, "doctor", "--clients", "0", status=1).err

    recipe = tmp_path / "mine.toml"
    recipe.write_text("[fedproto]\nlamda = 2.0\n")
    printed = output(capsys, "doctor", "--recipe", recipe, status=1).out
    wrong = "WRONG   settings      fedproto.lamda: unknown key; did you mean fedproto.lambda?\n"

    assert printed.startswith(wrong)


def test_patients_are_not_on_both_sides_where_their_column_means_sites(
    capsys, monkeypatch, tmp_path
):
    """With a partition by domains the column ``client`` is of sites, not of patients."""
    words = ["test-from=official-own", "--clients", "2", "partition=feature-shift"]
    plant = written("p.csv", PATIENTS, *OF_PATIENTS, *words)
    _, found = findings(capsys, *plant(monkeypatch, tmp_path))

    assert BOTH_SIDES not in str(found)


@pytest.mark.parametrize(("name", "value", "topic", "text"), [
    ("PROC", Path("/none"), "memory", r"cannot be told here \(FileNotFoundError\("),
    ("check_settings", ord, "settings",
        r"a fault of ProtoFL: TypeError: ord\(\) takes exactly one argument.*doctor.py, line"),
])  # fmt: skip
def test_a_check_that_fails_is_wrong_and_hides_no_other(
    name, value, topic, text, monkeypatch, capsys
):
    """A check raises an unexpected error, and the others have their findings."""
    monkeypatch.setattr(doctor, name, value)
    status, found = findings(capsys)

    assert status == 1

    (failed,) = [finding for finding in found if finding["topic"] == topic]
    assert failed["level"] == "wrong"
    assert re.match(text, failed["text"])
    assert {"versions", "torch", "processes"} <= {finding["topic"] for finding in found}


def test_any_command_ends_with_the_place_of_a_fault(monkeypatch, capsys):
    monkeypatch.setattr("protofl_common.tools.cli.list.lists", ord)
    last = output(capsys, "list", status=1).err.splitlines()[-1]

    assert last.startswith("protofl: a fault of ProtoFL: TypeError: ord() takes exactly one")
    assert "tools/cli/list.py, line" in last


@pytest.mark.parametrize(("options", "level", "said"), [
    ("models=mlp-1", "ok", "mlp-1, 4482 parameters, tried on two samples"),
    ("models=cnn4", "wrong", "arch 'cnn4' is for square images"),
])  # fmt: skip
def test_the_model_is_tried_on_two_samples(options, level, said, tmp_path, capsys):
    """Data that can be read may still be data that no model can train on."""
    lines = [f"{number},{number * 7 % 5},{'xy'[number % 2]}" for number in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["a,b,label", *lines]))
    words = ["dataset=arrays", f"data-dir={tmp_path}/a.csv", f"cache-dir={tmp_path}/cache"]
    status, found = findings(capsys, *words, "partition=iid", "--clients", "2", options)

    assert status == (level == "wrong")

    (tried,) = [finding for finding in found if said in finding["text"]]
    assert tried["level"] == level
