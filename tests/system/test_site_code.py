"""Whose code a site runs: a bundle with changed client code, at a site of each kind."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machines import changed_checkout
from tests.support.processes import BIN, Connection, superlink, supernode

pytestmark = pytest.mark.system

PROTOFL = str(BIN / "protofl")


class Federation:
    """A SuperLink and two sites: east runs its own code, south whatever comes."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self.changed = changed_checkout(folder / "changed", "client_app")
        self.link: Connection = running.enter_context(superlink(folder))
        programs = {"east": (PROTOFL, "site", "run"), "south": ("flower-supernode",)}
        for site, program in programs.items():
            running.enter_context(supernode(self.link, folder / site, self.facts(site), program))

    def facts(self, site: str) -> str:
        places = f'state-dir="{self.folder / site / "state"}" cache-dir="{self.folder / site / "cache"}"'
        return f'site-name="{site}" partition-id={("east", "south").index(site)} num-partitions=2 {places}'

    def run(self, app: Path, name: str, clients: int) -> tuple[str, str]:
        settings = 'dataset="digits" partition="iid" models="cnn4" rounds=1 local-epochs=1 train-samples=20 threads=1'
        settings += f' num-clients={clients} run-name="{name}" out-dir="{self.folder / "runs"}"'
        return self.link.run("--run-config", settings, app=app)

    def sites(self, name: str) -> set[str]:
        return set(json.loads((self.folder / "runs" / name / "summary.json").read_text())["clients"])

    def log(self, site: str) -> str:
        return (self.folder / site / "supernode.log").read_text()

    def home(self, site: str) -> Path:
        """A site's Flower home, in which bundles are unpacked."""
        return self.folder / site / "home"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """It stands for all tests."""
    with ExitStack() as running:
        yield Federation(tmp_path_factory.mktemp("sites"), running)


def test_changed_code_runs_at_no_site_of_site_run(federation: Federation) -> None:
    output, status = federation.run(federation.changed, "changed", clients=2)
    assert status == "finished:completed", output + federation.log("south")
    assert federation.sites("changed") == {"east", "south"}
    came = {site: (federation.home(site) / "was-here").exists() for site in ("east", "south")}
    assert came == {"east": False, "south": True}
    assert not list(federation.home("east").rglob("client_app"))  # not even unpacked


def test_changed_defaults_are_refused_where_the_sites_own_count(federation: Federation) -> None:
    settings = federation.changed / "pyproject.toml"
    settings.write_text(settings.read_text().replace("\nlr = ", "\nlr = 1"))
    output, _ = federation.run(federation.changed, "defaults", clients=2)
    assert "east cannot take part: settings with the digest" in output
    assert "settings with the digest" in federation.log("east")
    assert "settings with the digest" not in federation.log("south")
