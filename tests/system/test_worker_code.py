"""Whose code the SuperLink's worker runs: a bundle with changed server code, at a worker of each kind."""

import json
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machines import changed_checkout
from tests.support.processes import BIN, Connection, environment, process, superlink, supernode

pytestmark = pytest.mark.system

PROTOFL = str(BIN / "protofl")


class Federation:
    """A SuperLink that starts nothing itself, a site that runs its own code, and whatever worker a test starts."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self.changed = changed_checkout(folder / "changed", "server_app")
        self.link: Connection = running.enter_context(superlink(folder, "--isolation", "process"))
        facts = f'site-name="east" partition-id=0 num-partitions=1 state-dir="{folder / "state"}"'
        facts += f' cache-dir="{folder / "cache"}"'
        running.enter_context(supernode(self.link, folder / "east", facts, (PROTOFL, "site", "run")))

    def run(self, name: str, *program: str) -> tuple[str, str]:
        """Submit the changed app while a worker is there; its output and status."""
        home, log = self.home(name), self.folder / f"{name}.log"
        command = [*program, "--insecure", "--runtime-api-address", f"127.0.0.1:{self.link.port}"]
        settings = 'dataset="digits" partition="iid" models="cnn4" rounds=1 local-epochs=1 train-samples=20 threads=1'
        settings += f' num-clients=1 min-clients=1 run-name="{name}" out-dir="{self.folder / "theirs"}"'
        with process(command, environment(home), log):
            return self.link.run("--run-config", settings, app=self.changed)

    def home(self, name: str) -> Path:
        """The Flower home of a run's worker, in which bundles are unpacked."""
        return self.folder / f"home-{name}"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """It stands for all tests."""
    with ExitStack() as running:
        yield Federation(tmp_path_factory.mktemp("worker"), running)


def test_changed_code_runs_at_no_worker_of_protofl(federation: Federation) -> None:
    results = federation.folder / "results"
    output, status = federation.run("ours", PROTOFL, "worker", "--out-dir", str(results))
    assert status == "finished:completed", output + (federation.folder / "ours.log").read_text()
    assert not (federation.home("ours") / "was-here").exists()
    assert not list(federation.home("ours").rglob("server_app"))  # not even unpacked
    assert not (federation.folder / "theirs").exists()
    assert set(json.loads((results / "ours" / "summary.json").read_text())["clients"]) == {"east"}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (results, *results.rglob("*"))}
    assert modes == {0o700, 0o600}


def test_it_runs_at_flowers_own(federation: Federation) -> None:
    """And so the test above can fail."""
    output, status = federation.run("stock", "flower-superexec")
    assert status == "finished:completed", output + (federation.folder / "stock.log").read_text()
    assert (federation.home("stock") / "was-here").exists()
