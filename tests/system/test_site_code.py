"""Whose code a site runs: a bundle with changed client code, at sites that differ in what they allow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.machines import copy_checkout
from tests.system.processes import BIN, Connection, superlink, supernode

pytestmark = pytest.mark.system

PROTOFL = str(BIN / "protofl")
LINE = "\nimport os, pathlib; pathlib.Path(os.environ['FLWR_HOME'], 'was-here').touch()\n"
"""What whoever submits adds to the client's code."""


def bundle_of(checkout: Path) -> str:
    """The hash of a checkout's bundle."""
    done = subprocess.run([PROTOFL, "site", "hash", str(checkout)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Federation:
    """A SuperLink and three sites: north allows one bundle, east runs its own code, south whatever comes."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self.honest, self.changed = folder / "honest", folder / "changed"
        for checkout in (self.honest, self.changed):
            copy_checkout(checkout)
        with (self.changed / "client_app" / "app.py").open("a") as code:
            code.write(LINE)
        self.allowed, self.strange = bundle_of(self.honest), bundle_of(self.changed)
        self.link: Connection = running.enter_context(superlink(folder))
        programs = {
            "north": (PROTOFL, "site", "run", "--allow-code", self.allowed),
            "east": (PROTOFL, "site", "run"),
            "south": ("flower-supernode",),
        }
        for site, program in programs.items():
            running.enter_context(supernode(self.link, folder / site, self.facts(site), program))

    def facts(self, site: str) -> str:
        """The node config of a site."""
        places = f'state-dir="{self.folder / site / "state"}" cache-dir="{self.folder / site / "cache"}"'
        return f'site-name="{site}" partition-id={("north", "east", "south").index(site)} num-partitions=3 {places}'

    def run(self, app: Path, name: str, clients: int) -> tuple[str, str]:
        """Submit a checkout; the output, and the run's status."""
        settings = 'dataset="digits" partition="iid" models="cnn4" rounds=1 local-epochs=1 train-samples=20 threads=1'
        settings += f' num-clients={clients} run-name="{name}" out-dir="{self.folder / "runs"}"'
        return self.link.run("--run-config", settings, app=app)

    def sites(self, name: str) -> set[str]:
        """Who took part in a run."""
        return set(json.loads((self.folder / "runs" / name / "summary.json").read_text())["clients"])

    def log(self, site: str) -> str:
        """What a site's processes have said."""
        return (self.folder / site / "supernode.log").read_text()

    def home(self, site: str) -> Path:
        """A site's Flower home, in which bundles are unpacked."""
        return self.folder / site / "home"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """It stands for all tests."""
    with ExitStack() as running:
        yield Federation(tmp_path_factory.mktemp("sites"), running)


def test_changed_code_is_refused_where_it_is_not_allowed_and_the_others_go_on(federation: Federation) -> None:
    output, status = federation.run(federation.changed, "changed", clients=2)
    assert status == "finished:completed", output + federation.log("south")
    assert federation.sites("changed") == {"east", "south"}
    told = f"north: refused the run's code, bundle {federation.strange}; its operator allows {federation.allowed}"
    assert f"protofl: {told}" in federation.log("north")
    assert f"cannot take part: {told}" in output
    came = {site: (federation.home(site) / "was-here").exists() for site in ("north", "east", "south")}
    assert came == {"north": False, "east": False, "south": True}
    for site in ("north", "east"):
        assert not list(federation.home(site).rglob("client_app"))  # not even unpacked


@pytest.mark.long  # the test above has sites whose code is allowed, too
def test_all_take_part_with_the_code_that_is_allowed(federation: Federation) -> None:
    output, status = federation.run(federation.honest, "honest", clients=3)
    assert status == "finished:completed", output + federation.log("north")
    assert federation.sites("honest") == {"north", "east", "south"}
    assert [path.parents[1].name for path in federation.home("north").rglob("client_app")] == ["apps"]
    assert not list(federation.home("east").rglob("client_app"))
