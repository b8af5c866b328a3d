"""The README as a newcomer follows it.

Its commands are run as they stand, in a folder that holds what they name. `Desk.substitutions` are
all in which the commands that are run differ from those that are read. ``make run`` is run by
`test_newcomer`, ``make test`` by the gate.
"""

import os
import re
from contextlib import ExitStack

import pytest
from PIL import Image

from tests.support import ROOT
from tests.support.machines import write_digits
from tests.support.processes import BIN, free_port, output_of, process, wait_for

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(sh|sh service|)\n(.*?)^```$", re.M | re.S)

pytestmark = pytest.mark.system


def commands(heading, kind):
    """Return the blocks of a kind, ``sh`` or ``sh service``, in a chapter of the README."""
    _before, _, chapter = README.partition(f"\n## {heading}\n")
    chapter, _, _after = chapter.partition("\n## ")
    return [text for found, text in BLOCK.findall(chapter) if found == kind]


class Desk:
    """A folder with photographs and tables, and how commands run in it."""

    def __init__(self, folder, temporary):
        self.folder = folder
        self.port = free_port()
        self.substitutions = {
            "rounds=5": "rounds=1",
            "--clients 3": "rounds=1 --clients 3",
            "127.0.0.1:8000": f"127.0.0.1:{self.port}",
            "--port 8000": f"--port {self.port} --control-api-address 127.0.0.1:{free_port()}",
            "9094": str(free_port()),
            "9095": str(free_port()),
            "/data/": f"{folder}/data/",
            'classes="benign,malignant"': 'classes="0,1,2"',
            "flwr run . ": f"flwr run {ROOT} ",
            "num-clients=2\\n": 'num-clients=2\\nrounds=1\\nthreads=1\\nrun-name="sites"\\n',
        }
        env = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
        self.environment = {
            **env,
            "HOME": str(folder),
            "TMPDIR": temporary,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }

    def script(self, text):
        """Return the command that runs a block, with the ports and folders of this desk."""
        for before, after in self.substitutions.items():
            text = text.replace(before, after)
        return ["sh", "-euc", text]

    def run(self, text):
        """Run a block, which must succeed, and return what it prints."""
        return output_of(self.script(text), self.environment, self.folder)

    def serve(self, text, running):
        """Start a block as a service, and wait until the SuperLink listens.

        The SuperLink is the first service, and a person waits for it before typing on.
        """
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
        service = process(self.script(text), self.environment, log, cwd=self.folder)
        wait_for(self.port, running.enter_context(service), log)


@pytest.fixture
def desk(tmp_path, short):
    return Desk(tmp_path, short)


def test_every_block_is_run_or_make():
    """Every block of the README is run by a test here, or has only targets of make."""
    blocks = BLOCK.findall(README)
    assert README.count("```") == 2 * len(blocks)

    run_by_tests = []
    for chapter in ("Quick start", "Your own data", "Separate machines"):
        run_by_tests += commands(chapter, "sh") + commands(chapter, "sh service")
    for kind, text in blocks:
        if kind:
            run_by_tests.remove(text)
        else:
            assert all(line.startswith("make ") for line in text.splitlines())
    assert run_by_tests == []


def test_the_readmes_quick_start(desk):
    """A run, its report, its exported model, and a prediction for the user's photo."""
    Image.new("RGB", (28, 28), "white").save(desk.folder / "photo.png")
    (block,) = commands("Quick start", "sh")
    output = desk.run(block)
    assert (desk.folder / "runs" / "one" / "report.html").exists()
    assert (desk.folder / "model" / "model.json").exists()
    assert "photo.png" in output
    assert "FedTGP" in output


def test_the_readmes_first_command_for_ones_own_data(desk):
    """It uses all 150 photos. All commands run in `tests/federation/test_first_run.py`."""
    write_digits(desk.folder / "photos", slice(150), classes=3)
    (block,) = commands("Your own data", "sh")
    first_command, *_ = block.splitlines()
    printed = desk.run(first_command)
    line = r"^samples: 150 found · (\d+) for training · (\d+) for testing · none left out$"
    found = re.search(line, printed, re.M)
    assert found, printed
    assert int(found[1]) + int(found[2]) == 150
    assert len(list(desk.folder.glob("runs/*/summary.json"))) == 1


def test_the_readmes_separate_machines(desk):
    """A first block writes files; services are started, and a last block makes a run on them."""
    for number, site in enumerate(("north", "south")):
        rows = slice(150 * number, 150 * (number + 1))
        write_digits(desk.folder / "data" / site, rows, classes=3)
    with ExitStack() as running:
        files, block = commands("Separate machines", "sh")
        desk.run(files)
        for service in commands("Separate machines", "sh service"):
            desk.serve(service, running)
        output = desk.run(block)
        assert (desk.folder / "runs" / "sites" / "summary.json").exists(), output
