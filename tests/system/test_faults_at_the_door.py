"""Faults that only real processes have, each at a site of its own.

Who is named where, and who goes on.
"""

import datetime
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from tests.support.machines import SITES, Machines, copy_checkout, write_digits
from tests.support.processes import free_port, process, without_colours

pytestmark = [pytest.mark.system, pytest.mark.long]
CLOCK = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


class Site:
    """A site with a folder of its own, and how its SuperNode is started."""

    def __init__(self, machines, name):
        """Write 60 images for the site; its keys are made by the fixture `logs`."""
        self.machines = machines
        self.name = name
        self.folder = machines.folder / name
        self.data = self.folder / "data"
        self.state = self.folder / "state"
        self.authority = machines.checkout("superlink") / "certs" / "ca.crt"
        self.environment = {}
        write_digits(self.data / "ward", slice(60))

    @property
    def command(self):
        """The words of ``protofl site run`` at this site, with its whole node config."""
        key = self.machines.checkout("superlink") / "certs" / "nodes" / self.name
        facts = f'site-name="{self.name}" data-dir="{self.data}" state-dir="{self.state}"'
        facts += f' cache-dir="{self.folder / "cache"}" arch="cnn4" device="cpu" approve=false'
        facts += ' dataset="domain-folder" classes="0,1,2,3,4,5,6,7,8,9"'
        command = ["protofl", "site", "run", "--superlink", f"localhost:{self.machines.door}"]
        command += ["--root-certificates", str(self.authority), "--port", str(free_port())]
        command += ["--auth-supernode-private-key", str(key), "--node-config", facts]
        return command

    def start(self):
        """Start the SuperNode, which runs until the machines stop."""
        env = self.machines.environment("superlink") | {"HOME": str(self.folder)} | self.environment
        started = process(self.command, env, self.folder / "log", cwd=self.folder)
        self.machines.running.enter_context(started)

    @property
    def log(self):
        return (self.folder / "log").read_text()


# -- what is done to a site ----------------------------------------------------------------------
def set_the_clock_wrong(site):
    """Let the site's clock be ten minutes ahead: libfaketime answers questions for the time."""
    library, *_ = CLOCK
    site.environment |= {"LD_PRELOAD": str(library), "FAKETIME": "+10m"}


def keep_an_old_certificate(site):
    """Let the site have a certificate of the authority that ended yesterday.

    It has the authority's name and key, and is otherwise like the present one.
    """
    certs = site.authority.parent
    old = x509.load_pem_x509_certificate((certs / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((certs / "ca.key").read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    builder = builder.not_valid_before(now - datetime.timedelta(days=9))
    builder = builder.not_valid_after(now - datetime.timedelta(days=1))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    ended = builder.sign(key, hashes.SHA384())
    site.authority = site.folder / "ca.crt"
    site.authority.write_bytes(ended.public_bytes(serialization.Encoding.PEM))


def renew_the_key(site):
    """Make a new key for the site, which nobody registers at the SuperLink."""
    renew = f"python docker/certificates.py certs --node {site.name} --renew {site.name}"
    site.machines.step("superlink", renew)


def run_older_code(site):
    """Let the site run a copy of the code that does not know the run's setting trim-fraction."""
    checkout = site.folder / "old"
    copy_checkout(checkout)
    remove_line(checkout / "pyproject.toml", "trim-fraction =")
    sections = checkout / "protofl_common" / "config" / "sections.py"
    field = re.compile(r"    trim_fraction: .*?\n    \)\n", re.DOTALL)
    older, removed = field.subn("", sections.read_text())
    assert removed == 1
    sections.write_text(older)
    site.environment["PYTHONPATH"] = str(checkout)


def remove_line(file, part):
    """Remove all lines of a file that hold ``part``."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if part not in line))


@dataclass(frozen=True)
class Fault:
    """What is done to a site, and what is said of it."""

    strike: Callable[[Site], None]
    at_server: str
    """A pattern of what the operator of the SuperLink reads of the site."""
    at_site: str
    """A pattern of what the site's own log says."""
    gets_in: bool = True
    """Its SuperNode is connected, so that the run waits for it and refuses it by name."""
    possible: bool = True
    """This machine has what it takes to strike."""


FAULTS = {
    "wrong-clock": Fault(
        set_the_clock_wrong,
        at_server=r"wrong-clock +\d+ +registered +no reply yet",
        at_site=r"WRONG clock: \d+ s ahead of the SuperLink's",
        gets_in=False,
        possible=bool(CLOCK),
    ),
    "old-certificate": Fault(
        keep_an_old_certificate,
        at_server=r"old-certificate +\d+ +registered +no reply yet",
        at_site=r"WRONG certificates: \S+: expired \d{4}-(.|\n)*has expired",
        gets_in=False,
    ),
    "new-key": Fault(
        renew_the_key,
        at_server=r"new-key +\d+ +registered +no reply yet",
        at_site="2004",  # Flower's number of an authentication that fails
        gets_in=False,
    ),
    "old-code": Fault(
        run_older_code,
        at_server="old-code cannot take part: settings with the digest",
        at_site="other defaults; install the same version",
    ),
}
"""Name of a site -> what is wrong there."""
POSSIBLE = [name for name, fault in FAULTS.items() if fault.possible]
INSIDE = [*SITES, *(name for name in POSSIBLE if FAULTS[name].gets_in)]
RUN = f"""flwr run . federation --stream \
    --run-config 'num-clients={len(INSIDE)} min-clients=2 join-timeout=1800' \
    --run-config 'rounds=1 local-epochs=1 threads=1' \
    --run-config 'partition="own" image-size=28 run-name="door"'
protofl status federation
"""
REGISTER = """import sys
from flwr.cli.app import app
for name in sys.argv[1:]:
    words = ["supernode", "register", f"certs/nodes/{name}.pub", "federation", "--name", name]
    app(words, standalone_mode=False)
"""
"""`flwr supernode register`, for all in one process."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Make a run of the two sites of docker/README.md and one site for each possible fault.

    Return site -> its log, and under "operator" what the run and `protofl status` print.
    """
    with ExitStack() as running:
        machines = Machines(tmp_path_factory.mktemp("faults"), running)
        machines.set_up()
        nodes = " ".join(f"--node {name}" for name in POSSIBLE)
        machines.step("superlink", f"python docker/certificates.py certs {nodes}")
        machines.step("superlink", f"python -c '{REGISTER}' {' '.join(POSSIBLE)}")

        log = machines.folder / "operator"
        command = machines.script("superlink", RUN)
        env = machines.environment("superlink")
        with process(command, env, log, machines.checkout("superlink")) as run:
            sites = [_strike_and_start(Site(machines, name)) for name in POSSIBLE]
            run.wait(timeout=600)
        logs = {site.name: site.log for site in sites}
        logs["operator"] = without_colours(log.read_text())
        return logs


def _strike_and_start(site):
    """Start a site with its fault, and wait until its log names that, for three minutes at most."""
    fault = FAULTS[site.name]
    fault.strike(site)
    site.start()
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and not re.search(fault.at_site, site.log):
        time.sleep(0.5)
    return site


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_site_on_both_sides(name, logs):
    if not FAULTS[name].possible:
        pytest.skip("no libfaketime")
    assert re.search(FAULTS[name].at_site, logs[name]), logs[name]
    assert re.search(FAULTS[name].at_server, logs["operator"]), logs["operator"]


def test_sites_without_a_fault_go_on_without_those_that_have_one(logs):
    """The run waits for all sites that get in, and goes on with the two that have no fault."""
    assert f"going on with 2 of {len(INSIDE)} clients" in logs["operator"]
    assert "finished:completed" in logs["operator"], logs["operator"]
    for site in SITES:
        line = rf"(?m)^{site} +\d+ +online +last reply: round 1 of door$"
        assert re.search(line, logs["operator"]), logs["operator"]
