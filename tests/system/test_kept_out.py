"""Sites that the SuperLink does not let in, as real processes: who is named where, and the others stay.

What is wrong with a site that gets in: `tests/test_site_faults.py`, and `test_site_code.py` for code that it refuses.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from tests.system.machines import SITES, Machines
from tests.system.processes import free_port, process

pytestmark = [pytest.mark.system, pytest.mark.long]
CLOCK = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


class Site:
    """A machine's folder, and how its SuperNode is started."""

    def __init__(self, machines: Machines, name: str) -> None:
        self.machines, self.name, self.folder = machines, name, machines.folder / name
        self.authority, self.environment = machines.checkout("superlink") / "certs/ca.crt", dict[str, str]()
        self.folder.mkdir()

    @property
    def command(self) -> list[str]:
        key = self.machines.checkout("superlink") / "certs/nodes" / self.name
        options = ["--superlink", f"localhost:{self.machines.door}", "--root-certificates", str(self.authority)]
        options += ["--port", str(free_port()), "--auth-supernode-private-key", str(key)]
        return ["protofl", "site", "run", *options, "--node-config", f'site-name="{self.name}"']

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


# -- what is done to a site --------------------------------------------------------------------------------------------


def set_the_clock_wrong(site: Site) -> None:
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


FAULTS: dict[str, tuple[Callable[[Site], None], str]] = {
    "wrong-clock": (set_the_clock_wrong, r"WRONG clock: \d+ s ahead of the SuperLink's"),
    "old-certificate": (keep_an_old_certificate, r"WRONG certificates: \S+: expired \d{4}-(.|\n)*has expired"),
    "new-key": (renew_the_key, "2004"),
}
"""Site -> what is done to it, and what its own log says."""
REGISTER = """import sys
from flwr.cli.app import app
for name in sys.argv[1:]:
    words = ["supernode", "register", f"certs/nodes/{name}.pub", "federation", "--name", name]
    app(words, standalone_mode=False)
"""
"""`flwr supernode register`, for all in one process."""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two sites without a fault (docker/README.md), and keys of the others."""
    with ExitStack() as running:
        found = Machines(tmp_path_factory.mktemp("faults"), running)
        found.set_up()
        nodes = " ".join(f"--node {name}" for name in FAULTS)
        found.step("superlink", f"python docker/certificates.py certs {nodes}")
        found.step("superlink", f"python -c '{REGISTER}' {' '.join(FAULTS)}")
        yield found


@pytest.mark.parametrize("name", FAULTS)
def test_a_site_that_is_not_let_in_is_named_on_both_sides(name: str, machines: Machines) -> None:
    if name == "wrong-clock" and not CLOCK:
        pytest.skip("no libfaketime")
    site, (strike, said) = Site(machines, name), FAULTS[name]
    strike(site)
    env = machines.environment("superlink") | {"HOME": str(site.folder)} | site.environment
    with process(site.command, env, site.folder / "log", cwd=site.folder):
        deadline = time.monotonic() + 120
        while not re.search(said, site.log):
            assert time.monotonic() < deadline, site.log
            time.sleep(0.5)
    told = _status(machines)
    while not all(re.search(rf"^{other} +\d+ +online", told, re.M) for other in SITES):
        assert time.monotonic() < deadline + 120, told
        told = _status(machines)
    assert re.search(rf"^{name} +\d+ +registered +no reply yet$", told, re.M), told


def _status(machines: Machines) -> str:
    return machines.run("superlink", "protofl status federation").stdout
