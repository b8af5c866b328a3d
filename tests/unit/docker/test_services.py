"""Systemd's units and the compose file are as tight as the pages say.

test_docker.py starts containers.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT

UNITS = sorted((ROOT / "docker" / "systemd").glob("*.service"))
PAGE = (ROOT / "docs" / "operations.md").read_text()


def text_of(path):
    return path.read_text()


@pytest.fixture
def units_here(tmp_path):
    """The files of the units, with the paths of this machine in the place of a server's."""
    paths = {
        "/opt/protofl/.venv/bin": str(Path(sys.executable).parent),
        "/opt/protofl": str(ROOT),
        "/usr/sbin/haproxy": sys.executable,  # which need not be here
    }
    files = []
    for unit in UNITS:
        text = text_of(unit)
        for path, path_here in paths.items():
            text = text.replace(path, path_here)
        file = tmp_path / unit.name
        file.write_text(text)
        files.append(str(file))
    return files


def test_every_service_of_the_page_has_a_unit_that_starts_it_as_the_page_does():
    """The page names the services, and the readme has their commands."""
    commands = "\n".join(text_of(unit).replace("\\\n", " ") for unit in UNITS).split()
    programs = {Path(word).name for word in commands if "/" in word}

    assert {unit.stem for unit in UNITS} == set(re.findall(r"protofl-\w+", PAGE)) - {"protofl-"}

    # what the readme types for a service has a program and options that a unit has as well
    readme = text_of(ROOT / "docker" / "README.md")
    for service in re.findall(r"(?ms)^```sh superlink service\n(.*?)^```", readme):
        words = service.replace("\\\n", " ").split()
        program = next(word for word in words if not re.match(r"[A-Z]+=", word))
        options = {word for word in words if word.startswith("--")}
        assert Path(program).name in programs
        assert options <= set(commands)


needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")


@needs_systemd
def test_systemd_reads_the_units(units_here):
    command = ["systemd-analyze", "verify", "--man=no", *units_here]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.stderr == ""
    assert done.returncode == 0


@needs_systemd
def test_the_page_says_how_exposed_a_site_is(units_here):
    """Systemd rates the unit of a site from 0 (safe) to 10 (exposed)."""
    (site,) = [unit for unit in units_here if "site" in unit]
    command = ["systemd-analyze", "security", "--offline=yes", site]
    done = subprocess.run(command, capture_output=True, text=True)
    (level,) = re.findall(r"exposure level for protofl-site\.service: ([\d.]+)", done.stdout)

    assert float(level) < 2.5  # versions of systemd differ
    assert "exposure 1.8 of 10" in text_of(ROOT / "docker/systemd/README.md")


FILE = ROOT / "docker" / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


def mounts(service):
    """Return where each volume of a service is mounted, with ``:ro`` if it cannot be written."""
    entries = SERVICES[service].get("volumes", ())
    return dict(entry.split(":", 1) for entry in entries)


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_can_do_no_more_than_it_must(service):
    """A container has no capabilities, a read-only root, limits of memory, processes and log."""
    facts = SERVICES[service]
    is_init = service == "init"  # which makes the volumes of the others, as root

    assert facts["cap_drop"] == ["ALL"]

    added = {"CHOWN", "DAC_OVERRIDE", "FOWNER"} if is_init else set()
    assert set(facts.get("cap_add", ())) == added
    assert facts["security_opt"] == ["no-new-privileges:true"]
    assert facts["read_only"]
    assert facts["tmpfs"] == ["/tmp"]
    assert {"mem_limit", "pids_limit", "ulimits"} <= facts.keys()
    assert {"max-size", "max-file"} <= facts["logging"]["options"].keys()
    assert ("user" in facts) is is_init
    assert not {"privileged", "ports", "devices", "pid", "ipc"} & facts.keys()


def test_each_role_has_its_own_keys_and_cannot_change_them():
    """A service has the volume of its own keys, read-only, and never that of the authority."""
    for service in set(SERVICES) - {"init"}:
        volumes = mounts(service)
        role = "operator" if service == "register" else service
        assert [volume for volume in volumes if volume.startswith("keys-")] == [f"keys-{role}"]
        assert volumes[f"keys-{role}"] == "/keys:ro"
        assert "authority" not in volumes
    assert SERVICES["init"]["network_mode"] == "none"


@pytest.mark.parametrize("site", ["north", "south", "east"])
def test_a_site_meets_nobody_but_the_gate(site):
    """The gate is the proxy before the SuperLink; a site shares a network with it alone."""
    (network,) = SERVICES[site]["networks"]
    members = {name for name, facts in SERVICES.items() if network in facts.get("networks", ())}
    assert members == {site, "gate"}


def test_the_page_renews_certificates_with_what_init_hands_out(tmp_path):
    """The SuperLink and the door get the new certificate, and all others the same authority.

    What the page's first command runs in the container of ``init`` is run here with paths of this
    machine. The names of servers and sites are those of the compose file.
    """
    page = text_of(ROOT / "docker" / "containers.md")
    (renewal,) = re.findall(r"(?ms)^```sh renewal\n(.*?)^```", page)
    (script,) = re.findall(r"run --rm init sh -c '(.*?)'", renewal, re.DOTALL)
    _, _, *sites = SERVICES["init"]["command"]
    roles = ("superlink", "gate", "worker", "operator", *sites)
    for role in roles:
        (tmp_path / "keys" / role).mkdir(parents=True)
    programs = tmp_path / "app" / "docker"
    programs.mkdir(parents=True)

    def here(text):
        text = re.sub("/(authority|keys/|app/)", rf"{tmp_path}/\1", text)
        return text.replace("owner=protofl", f"owner={os.getuid()}")

    for name in ("init.sh", "certificates.py"):
        (programs / name).write_text(here(text_of(ROOT / "docker" / name)))
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(command):
        """Run a command of the shell; return the certificate, or authority, of each role."""
        subprocess.run(["sh", "-euc", here(command)], env=path, check=True, capture_output=True)
        certificates = {role: (tmp_path / "keys" / role / "ca.crt").read_bytes() for role in roles}
        for role in ("superlink", "gate"):
            certificates[role] = (tmp_path / "keys" / role / "server.crt").read_bytes()
        return certificates

    before = run(" ".join(SERVICES["init"]["command"]))
    after = run(script)

    changed = {role for role in roles if before[role] != after[role]}
    assert changed == {"superlink", "gate"}
    assert after["superlink"] == after["gate"]
    assert renewal.rstrip().endswith("restart superlink gate")
    assert run(" ".join(SERVICES["init"]["command"])) == after, "the next start keeps it"
