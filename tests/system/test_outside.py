"""A package of somebody else's, installed beside this one, and never named in its code."""

import json
import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from protofl_common.tools.arguments import read_recipe
from tests.support import ROOT
from tests.support.installed import install_into
from tests.support.processes import BIN, output_of, start_in_terminal, wait_until

pytestmark = pytest.mark.system
PAGE = ROOT / "docs" / "extend.md"
RUN = "moon"
HOLDING = """
import os, pathlib, time
def hold(row):
    held = pathlib.Path(__file__).with_name("held")
    while row["round"] == 2 and (not held.exists() or held.read_text() == str(os.getpid())):
        held.write_text(str(os.getpid()))
        time.sleep(0.1)
"""
"""A callback that keeps the first process from going on after round 2, until it is ended."""
CLASSES = ["horizontal", "rising", "falling"]


@pytest.fixture(autouse=True)
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package for every process that is started here; this one cannot import it."""
    folder = install_into(tmp_path / "site-packages")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def env(short: str) -> dict[str, str]:
    return os.environ | {"TMPDIR": short, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def command_of_the_page() -> list[str]:
    """Return the words of `protofl run` in docs/extend.md, which stands on several lines."""
    text = PAGE.read_text(encoding="utf-8")
    command = re.search(r"^protofl run (?:[^\n]*\\\n)*[^\n]*", text, re.MULTILINE)
    return shlex.split(command[0].replace("\\\n", " "))


def stop_in_round_2(
    words: list[str], folder: Path, site_packages: Path, env: dict[str, str]
) -> None:
    """Run a command, and end it with Ctrl-C while its callback for round 2 holds it up.

    The round's checkpoint is then not written, so the run can be resumed after round 1.
    """
    held = site_packages / "held"
    (site_packages / "holding.py").write_text(HOLDING)
    settings = [f"out-dir={folder.parent}", f"run-name={RUN}", "callback=holding:hold"]
    process = start_in_terminal(*words, *settings, env=env)

    def is_held() -> bool:
        return held.exists() and bool(held.read_text())

    def output_so_far() -> str:
        output, _ = process.communicate(timeout=9)
        return output

    wait_until(is_held, output_so_far, timeout=600, started=process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    with suppress(ProcessLookupError):  # Flower's simulation may wait for the callback
        os.kill(int(held.read_text()), signal.SIGKILL)


@pytest.mark.long
def test_the_pages_command_resumes_and_predicts(
    tmp_path: Path, site_packages: Path, env: dict[str, str]
) -> None:
    """The run of docs/extend.md is stopped and resumed, and its model is exported and predicts."""
    folder = tmp_path / "runs" / RUN
    stop_in_round_2(command_of_the_page(), folder, site_packages, env)
    assert not (folder / "summary.json").exists()

    allowed = ("--allow-python", "outside_moon,holding")
    resumed = output_of(("protofl", "run", "--recipe", str(folder / "resume.toml"), *allowed), env)
    assert f"resuming {RUN} after round 1 of 5" in resumed
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == int(read_recipe(str(folder / "resume.toml")).settings["rounds"])
    assert summary["resumed-after-rounds"] == [1]
    assert sum(summary["trouble"].values()) == 0
    assert summary["accuracy"]["head"]["mean"] > 0.6
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 5]
    assert all(row["losses"]["contrast"] > 0 for row in rows[1:5])

    model = tmp_path / "model"
    image = tmp_path / "stripes.png"
    output_of(("protofl", "export", str(folder), "--site", "site-1", "--out", str(model)), env)
    card = json.loads((model / "model.json").read_text())
    assert card["algorithm"] == "my-moon"
    assert card["arch"] == "outside_moon.net:TinyViT"
    assert card["classes"] == CLASSES
    # another process can import the package, and writes one of its images
    draw = "import sys, outside_moon.data; from PIL import Image; "
    draw += "Image.fromarray(outside_moon.data.stripes('')['inputs'][0, 0]).save(sys.argv[1])"
    output_of((sys.executable, "-c", draw, str(image)), env)
    assert Image.open(image).size == (28, 28)
    words = ("predict", str(model), str(image), "--json", "--allow-python", "outside_moon")
    prediction = json.loads(output_of(("protofl", *words), env))
    assert prediction["name"] in CLASSES
    assert 0 < prediction["probability"] <= 1
