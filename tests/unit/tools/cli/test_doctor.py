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


def planted(name: str, value: object) -> Plant:
    def plant(patch: Patch, folder: Path) -> list[str]:
        patch.setattr(doctor, name, value)
        return []

    return plant


def asked(*words: str) -> Plant:
    return lambda patch, folder: [word.replace("FOLDER", str(folder)) for word in words]


def no_torch(patch: Patch, folder: Path) -> list[str]:
    patch.setitem(sys.modules, "torch", None)
    return []


def written(name: str, text: str, *words: str, **places: str) -> Plant:
    """A file in FOLDER; ``places``: where in it the doctor looks for something of the machine."""

    def plant(patch: Patch, folder: Path) -> list[str]:
        (folder / name).write_text(text)
        for attribute, path in places.items():
            patch.setattr(doctor, attribute, folder / path)
        return asked(*words)(patch, folder)

    return plant


USAGE = SimpleNamespace(total=10**8, free=10**7)
LEFT = SimpleNamespace(
    stdout="    1     0 init\n"
    " 4711     1 /usr/bin/python /env/bin/flower-superlink --insecure --simulation\n"
    " 4713     1 /usr/bin/python /env/bin/flower-superlink --ssl-keyfile key\n 4712     1 /x/raylet -a\n"
)
PATIENTS = "a,label,client,split\n1,x,P,train\n2,y,P,test\n3,y,Q,train\n4,x,Q,test\n"
OF_P = ("dataset=arrays", "data-dir=FOLDER/p.csv", "cache-dir=FOLDER")
FAULTS: dict[str, tuple[Plant, str, str, str]] = {
    "an old Flower": (planted("requires", lambda name: ["flwr<1.0"]), "wrong", "is not <1.0",
        "-m pip install 'flwr<1.0'"),
    "a package that is missing": (planted("requires", lambda name: ["nonesuch>=2"]), "wrong",
        "nonesuch is not installed", "install 'nonesuch>=2'"),
    "no Flower commands": (planted("BIN", Path("/none")), "wrong", "flower-superlink is not in /none",
        "force-reinstall flwr"),
    "a broken PyTorch": (no_torch, "wrong", "PyTorch cannot be loaded", "force-reinstall torch"),
    "no GPU": (asked("device=cuda:99"), "wrong", "device = 'cuda:99': PyTorch", "take device=cpu"),
    "no memory": (written("meminfo", "MemTotal: 9000000 kB\nMemAvailable: 300000 kB\n", PROC=""), "wrong",
        ", 0.3 GB free", "--cpus"),
    "a folder that cannot be written": (written("runs", "", "out-dir=FOLDER/runs"), "wrong", "cannot be written",
        "out-dir=FOLDER"),
    "a full disk": (planted("shutil", SimpleNamespace(disk_usage=lambda path: USAGE)), "warning", "10 MB free",
        "out-dir=FOLDER on another disk"),
    "little shared memory": (planted("shutil", SimpleNamespace(disk_usage=lambda path: USAGE)), "warning",
        "100 MB of shared memory", "--shm-size=1g"),
    "no data": (asked("dataset=image-folder", "data-dir=FOLDER/none"), "wrong", "there is no such folder",
        "correct that setting"),
    "data that cannot be read": (
        written("bad.csv", "a,label\n1,x\nfoo,y\n", "dataset=arrays", "data-dir=FOLDER/bad.csv", "cache-dir=FOLDER"),
        "wrong", "bad.csv, line 3, column 'a': 'foo' is not a finite number", "correct that setting"),
    "patients on both sides": (written("p.csv", PATIENTS, *OF_P, "test-from=official-own", "--clients", "1"), "warning",
        "2 values of `client` are both trained on and tested", "mend `split`"),
    "another number of clients": (written("p.csv", PATIENTS, *OF_P, "partition=natural", "--clients", "1"), "wrong",
        "the data name 2 clients, not 1", "correct that setting"),
    "a wrong setting": (asked("lr=fast"), "wrong", "lr = 'fast': must be a number above 0", "correct that setting"),
    "a SuperLink left": (planted("subprocess", SimpleNamespace(run=lambda *a, **k: LEFT)), "warning",
        "flower-superlink (4711) is left", "kill 4711"),
    "a Ray left": (planted("subprocess", SimpleNamespace(run=lambda *a, **k: LEFT)), "warning", "raylet (4712) is left",
        "kill 4712"),
    "a note of a cluster": (written("ray_current_cluster", "10.0.0.1:6379", RAY_NOTE="ray_current_cluster"), "warning",
        "plain `flwr run` waits", "ray stop, or rm"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def well(monkeypatch: Patch, tmp_path: Path) -> None:
    """What this machine itself may have of such faults does not count."""
    monkeypatch.setattr(doctor, "RAY_NOTE", tmp_path / "none")


def findings(capsys: Printed, *words: str) -> tuple[int, list[dict[str, str]]]:
    return main(["doctor", *words, "--json"]), json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_with_a_cure(
    fault: str, monkeypatch: Patch, tmp_path: Path, capsys: Printed
) -> None:
    plant, level, text, cure = FAULTS[fault]
    _, before = findings(capsys)
    assert not [one for one in before if text in one["text"]]
    with monkeypatch.context() as patch:
        status, found = findings(capsys, *plant(patch, tmp_path))
    one = next(one for one in found if text in one["text"])
    assert one["level"] == level
    assert cure in one["cure"]
    assert "4713" not in str(found)  # a SuperLink that simulates nothing may be a service
    assert status == 1 or level != "wrong"


def test_what_is_wrong_stands_first_with_its_cure_below(
    capsys: Printed, monkeypatch: Patch, tmp_path: Path
) -> None:
    assert "--clients 0: must be" in output(capsys, "doctor", "--clients", "0", status=1).err
    first, second, *_ = output(capsys, "doctor", "lr=fast", status=1).out.splitlines()
    assert first == "WRONG   settings      lr = 'fast': must be a number above 0"
    assert second == f"{'':22}do: correct that setting; protofl list shows choices"
    (recipe := tmp_path / "mine.toml").write_text("[fedproto]\nlamda = 2.0\n")
    assert main(["doctor", "--recipe", str(recipe)]) == 1
    wrong = "WRONG   settings      fedproto.lamda: unknown key; did you mean fedproto.lambda?\n"
    assert capsys.readouterr().out.startswith(wrong)
    sites = written(
        "p.csv",
        PATIENTS,
        *OF_P,
        "test-from=official-own",
        "--clients",
        "2",
        "partition=feature-shift",
    )
    assert "both trained on and tested" not in str(findings(capsys, *sites(monkeypatch, tmp_path)))


def test_a_check_that_fails_hides_no_other(monkeypatch: Patch, capsys: Printed) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("ps")

    monkeypatch.setattr(doctor, "subprocess", SimpleNamespace(run=fails))
    _, found = findings(capsys)
    (text,) = [one["text"] for one in found if one["topic"] == "processes"]
    assert text == "cannot be told here (FileNotFoundError('ps'))"
    assert {"versions", "torch", "memory"} <= {one["topic"] for one in found}
