"""Ten faults, each at a site of its own, in one run on real Flower processes: who is named where, and who goes on."""

from __future__ import annotations

import datetime
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from PIL import Image

from tests.system.machines import SITES, Machines, _write_site, copy_checkout
from tests.system.processes import free_port, process

pytestmark = [pytest.mark.system, pytest.mark.long]
CLOCK = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


class Site:
    """A machine's folder, and how its SuperNode is started."""

    def __init__(self, machines: Machines, name: str) -> None:
        self.machines, self.name, self.folder = machines, name, machines.folder / name
        self.data, self.state = self.folder / "data", self.folder / "state"
        self.authority, self.environment = machines.checkout("superlink") / "certs/ca.crt", dict[str, str]()
        self.program = ["protofl", "site", "run"]
        self.folder.mkdir()
        _write_site(self.data, slice(60))

    @property
    def command(self) -> list[str]:
        key = self.machines.checkout("superlink") / "certs/nodes" / self.name
        options = ["--superlink", f"localhost:{self.machines.door}", "--root-certificates", str(self.authority)]
        options += ["--port", str(free_port()), "--auth-supernode-private-key", str(key)]
        facts = f'site-name="{self.name}" data-dir="{self.data}" state-dir="{self.state}" arch="cnn4" device="cpu"'
        return [*self.program, *options, "--node-config", f'{facts} cache-dir="{self.folder / "cache"}"']

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


# -- what is done to a site --------------------------------------------------------------------------------------------


def misspell(site: Site) -> None:
    (site.data / "ward/9").rename(site.data / "ward/nine")


def truncate(site: Site) -> None:
    file = site.data / "ward/0/0.png"
    file.write_bytes(file.read_bytes()[:60])


def resize(site: Site) -> None:
    for file in site.data.rglob("*.png"):
        Image.open(file).resize((13, 21)).save(file)


def make_unwritable(site: Site) -> None:
    site.state.write_text("a file, and no folder: not even root can write below it")


def fill_the_disk(site: Site) -> None:
    site.state.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", site.state], check=False).returncode:
        pytest.skip("only root makes a small disk")
    site.machines.running.callback(subprocess.run, ["umount", "-l", site.state], check=True)
    (site.state / "filler").write_bytes(bytes(2**16))


def set_the_clock_wrong(site: Site) -> None:
    if not CLOCK:
        pytest.skip("no libfaketime")
    site.environment |= {"LD_PRELOAD": str(CLOCK[0]), "FAKETIME": "+10m"}


def keep_an_old_certificate(site: Site) -> None:
    """Of the same authority, and the same key, but it has ended."""
    certs = site.authority.parent
    old = x509.load_pem_x509_certificate((certs / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((certs / "ca.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    made = made.not_valid_before(now - datetime.timedelta(days=9)).not_valid_after(now - datetime.timedelta(days=1))
    for one in old.extensions:
        made = made.add_extension(one.value, one.critical)
    site.authority = site.folder / "ca.crt"
    site.authority.write_bytes(made.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))  # type: ignore[arg-type]


def renew_the_key(site: Site) -> None:
    """And tell nobody."""
    site.machines.step("superlink", f"python docker/certificates.py certs --node {site.name} --renew {site.name}")


def allow_another_bundle(site: Site) -> None:
    site.program += ["--allow-code", "ab" * 32]


def run_older_code(site: Site) -> None:
    """Which does not know a setting that the run has."""
    copy_checkout(site.folder / "old")
    for file, line in (("pyproject.toml", "trim-fraction ="), ("protofl_common/config/sections.py", "trim_fraction:")):
        path = site.folder / "old" / file
        path.write_text("".join(one for one in path.read_text().splitlines(True) if line not in one))
    site.environment |= {"PYTHONPATH": str(site.folder / "old")}


@dataclass(frozen=True)
class Fault:
    """What is done, what the server says of the site, and what the site's log says."""

    strike: Callable[[Site], None]
    at_server: str
    at_site: str


UNREADABLE = "its data cannot be read or divided as the run asks; the log of the site says more"
UNWRITABLE = r"StateError \(state-dir\): its model of this run cannot be read or written; the log of the site says more"
FAULTS = {
    "misspelt-class": Fault(
        misspell,
        r"misspelt-class: the sites differ in classes; .*\n.*: north, other-size, south\n.* nine: misspelt-class",
        r"query 0: sent site, .*; its classes: .*, nine",
    ),
    "truncated-image": Fault(
        truncate,
        f"truncated-image cannot take part: DataError: {UNREADABLE}",
        r"ward/0/0\.png is not a readable image",
    ),
    "other-size": Fault(resize, r"other-size +\d+ +online +last reply: round 1 of ten", r"train 1: sent prototypes"),
    "no-writing": Fault(make_unwritable, f"no-writing cannot take part: {UNWRITABLE}", r"no-writing/state .*written"),
    "full-disk": Fault(fill_the_disk, f"full-disk cannot take part: {UNWRITABLE}", r"No space left on device"),
    "wrong-clock": Fault(
        set_the_clock_wrong, r"wrong-clock +\d+ +registered +no reply yet", r"WRONG clock: \d+ s ahead"
    ),
    "old-certificate": Fault(
        keep_an_old_certificate, r"old-certificate +\d+ +registered +no reply yet", "certificate has expired"
    ),
    "new-key": Fault(renew_the_key, r"new-key +\d+ +registered +no reply yet", "2004"),
    "strange-code": Fault(
        allow_another_bundle,
        rf"cannot take part: strange-code: refused the run's code, bundle \w{{64}}; its operator allows {'ab' * 32}",
        r"strange-code: refused the run's code, bundle",
    ),
    "old-code": Fault(
        run_older_code, r"old-code cannot take part: trim-fraction: unknown key", r"trim-fraction: unknown key"
    ),
}


REGISTER = """import sys
from flwr.cli.app import app
for name in sys.argv[1:]:
    words = ["supernode", "register", f"certs/nodes/{name}.pub", "federation", "--name", name]
    app(words, standalone_mode=False)
"""
"""`flwr supernode register`, for all in one process."""


@dataclass
class Story:
    """What came of the run."""

    told: str = ""
    sites: dict[str, Site] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Two sites without a fault (docker/README.md) and one for each; what the operator of the SuperLink then sees."""
    with ExitStack() as running:
        machines, story = Machines(tmp_path_factory.mktemp("faults"), running), Story()
        machines.set_up()
        nodes = " ".join(f"--node {name}" for name in FAULTS)
        machines.step("superlink", f"python docker/certificates.py certs {nodes}")
        machines.step("superlink", f"python -c '{REGISTER}' {' '.join(FAULTS)}")
        for name, fault in FAULTS.items():
            site = Site(machines, name)
            try:
                fault.strike(site)
            except pytest.skip.Exception as skip:
                story.skipped[name] = str(skip)
                continue
            story.sites[name] = site
            env = machines.environment("superlink") | {"HOME": str(site.folder)} | site.environment
            running.enter_context(process(site.command, env, site.folder / "log", cwd=site.folder))
        story.told = _run(machines, story)
        yield story


def _run(machines: Machines, story: Story) -> str:
    """One round of those that can; the output of the run and of `protofl status`."""
    outside = ("wrong-clock", "old-certificate", "new-key")
    inside = [*SITES, *(name for name in story.sites if name not in outside)]
    deadline = time.monotonic() + 900
    while not all(re.search(rf"^{site} .* online ", told := _status(machines), re.M) for site in inside):
        assert time.monotonic() < deadline, told + machines.logs()
        time.sleep(10)
    asked = f"num-clients={len(inside)} min-clients=3 rounds=1 local-epochs=1 threads=1 image-size=28 join-timeout=1200"
    asked += ' dataset="domain-folder" partition="own" run-name="ten"'
    done = machines.run("superlink", f"flwr run . federation --stream --run-config '{asked}'", timeout=2000)
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr) + _status(machines)


def _status(machines: Machines) -> str:
    return machines.run("superlink", "protofl status federation", timeout=200).stdout


def test_the_others_go_on(story: Story) -> None:
    assert "finished:completed" in story.told, story.told
    assert "going on with 3 of" in story.told


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_site_on_both_sides(name: str, story: Story) -> None:
    if name in story.skipped:
        pytest.skip(story.skipped[name])
    fault = FAULTS[name]
    assert re.search(fault.at_server, story.told), story.told
    assert re.search(fault.at_site, story.sites[name].log), story.sites[name].log
