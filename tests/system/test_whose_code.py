"""Whose code runs, where a bundle has changed client and server code.

At a site, and at a worker, of each kind.
"""

import json
import stat
from contextlib import ExitStack

import pytest

from tests.support.machines import changed_checkout
from tests.support.processes import BIN, environment, process, superlink, supernode

pytestmark = pytest.mark.system

PROTOFL = str(BIN / "protofl")


class Federation:
    """A SuperLink that starts nothing itself, and two sites.

    East runs its own code, south whatever comes.
    """

    def __init__(self, folder, running):
        self.folder = folder
        self.changed = changed_checkout(folder / "changed")
        self.link = running.enter_context(superlink(folder, "--isolation", "process"))
        programs = {
            "east": (PROTOFL, "site", "run", "--start-method", "spawn"),  # others run with "fork"
            "south": ("flower-supernode",),
        }
        for number, (site, program) in enumerate(programs.items()):
            facts = f'site-name="{site}" partition-id={number} num-partitions=2'
            facts += f' state-dir="{folder / site / "state"}" cache-dir="{folder / site / "cache"}"'
            running.enter_context(supernode(self.link, folder / site, facts, program))

    def run(self, name, *program):
        """Submit the changed app while a worker, this ``program``, is there.

        Return what the run prints, and its status.
        """
        command = [*program, "--insecure", "--runtime-api-address", f"127.0.0.1:{self.link.port}"]
        settings = 'dataset="digits" partition="iid" models="cnn4" train-samples=20 threads=1'
        settings += f' rounds=1 local-epochs=1 num-clients=2 run-name="{name}"'
        settings += f' out-dir="{self.folder / "theirs" / name}"'
        with process(command, environment(self.home(name)), self.folder / f"{name}.log"):
            return self.link.run("--run-config", settings, app=self.changed)

    def log(self, site):
        return (self.folder / site / "supernode.log").read_text()

    def home(self, name):
        """Return the Flower home of a site, or of a run's worker, in which bundles are unpacked."""
        return self.folder / name / "home"

    def has_run_changed_code(self, name):
        """True if the changed code has run at a site, or at a run's worker."""
        return (self.home(name) / "was-here").exists()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Start one federation for all tests of this file."""
    with ExitStack() as running:
        yield Federation(tmp_path_factory.mktemp("sites"), running)


def test_changed_code_runs_neither_at_a_site_of_site_run_nor_at_a_worker_of_protofl(federation):
    """East is a `protofl site run`, south Flower's SuperNode, which runs whatever is submitted."""
    results = federation.folder / "results"
    output, status = federation.run("ours", PROTOFL, "worker", "--out-dir", str(results))

    assert status == "finished:completed", output + federation.log("south")
    summary = json.loads((results / "ours" / "summary.json").read_text())
    assert set(summary["clients"]) == {"east", "south"}
    assert not federation.has_run_changed_code("ours")
    assert not federation.has_run_changed_code("east")
    assert federation.has_run_changed_code("south")
    # not even unpacked
    assert not list(federation.home("ours").rglob("server_app"))
    assert not list(federation.home("east").rglob("client_app"))
    assert not (federation.folder / "theirs" / "ours").exists()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (results, *results.rglob("*"))}
    assert modes == {0o700, 0o600}


def test_changed_code_runs_at_flowers_worker_and_changed_defaults_are_refused_by_site_run(
    federation,
):
    """The submitted app has another default of lr: east, which runs its own code, refuses that."""
    settings = federation.changed / "pyproject.toml"
    before = settings.read_text()
    settings.write_text(before.replace("\nlr = ", "\nlr = 1"))  # 0.05 becomes 10.05
    try:
        output, _ = federation.run("stock", "flower-superexec")
    finally:
        settings.write_text(before)  # the other test may run after this one
    assert federation.has_run_changed_code("stock")
    assert "east cannot take part: settings with the digest" in output
    assert "settings with the digest" in federation.log("east")
    assert "settings with the digest" not in federation.log("south")
