"""The units for systemd and the compose file: read, and as tight as the pages say; test_docker.py starts containers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT

UNITS = sorted((ROOT / "docker" / "systemd").glob("*.service"))
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace(
            "/opt/protofl/.venv/bin", str(Path(sys.executable).parent)
        )
        text = text.replace("/usr/sbin/haproxy", sys.executable)  # which need not be here
        (tmp_path / unit.name).write_text(text.replace("/opt/protofl", str(ROOT)))
    return [str(tmp_path / unit.name) for unit in UNITS]


def test_every_service_of_the_page_has_a_unit_that_starts_it_as_the_page_does() -> None:
    readme = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    started = " ".join(
        " ".join(unit.read_text(encoding="utf-8").replace("\\\n", " ").split()) for unit in UNITS
    )
    assert {unit.stem for unit in UNITS} == set(re.findall(r"protofl-\w+", PAGE)) - {"protofl-"}
    for service in re.findall(r"(?ms)^```sh superlink service\n(.*?)^```", readme):
        words = service.replace("\\\n", " ").split()
        program = next(word for word in words if not re.match(r"[A-Z]+=", word))
        assert f"/{Path(program).name} " in started
        assert {word for word in words if word.startswith("--")} <= set(started.split())


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_reads_the_units(here: list[str]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *here], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_the_page_says_how_exposed_a_site_is(here: list[str]) -> None:
    (site,) = [unit for unit in here if "site" in unit]
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", site], capture_output=True, text=True
    )
    (level,) = re.findall(r"exposure level for protofl-site\.service: ([\d.]+)", done.stdout)
    assert float(level) < 2.5  # versions of systemd differ
    assert "exposure 1.8 of 10" in (ROOT / "docker/systemd/README.md").read_text(encoding="utf-8")


FILE = ROOT / "docker" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]


def mounts(service: str) -> dict[str, str]:
    """Volume -> where, with ``:ro`` where it cannot be written."""
    return dict(entry.split(":", 1) for entry in SERVICES[service].get("volumes", ()))


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_can_do_no_more_than_it_must(service: str) -> None:
    what = SERVICES[service]
    assert what["cap_drop"] == ["ALL"]
    assert set(what.get("cap_add", ())) == (
        {"CHOWN", "DAC_OVERRIDE", "FOWNER"} if service == "init" else set()
    )
    assert what["security_opt"] == ["no-new-privileges:true"]
    assert what["read_only"]
    assert what["tmpfs"] == ["/tmp"]
    assert {"mem_limit", "pids_limit", "ulimits"} <= what.keys()
    assert {"max-size", "max-file"} <= what["logging"]["options"].keys()
    assert ("user" in what) == (service == "init")
    assert not {"privileged", "ports", "devices", "pid", "ipc"} & what.keys()


def test_each_role_has_its_own_keys_and_cannot_change_them() -> None:
    for service in set(SERVICES) - {"init"}:
        keys = {
            volume: where for volume, where in mounts(service).items() if volume.startswith("keys-")
        }
        role = "operator" if service == "register" else service
        assert keys == {f"keys-{role}": "/keys:ro"}
        assert "authority" not in mounts(service)
    assert SERVICES["init"]["network_mode"] == "none"


def test_a_site_meets_nobody_but_the_door() -> None:
    for site in ("north", "south", "east"):
        (network,) = SERVICES[site]["networks"]
        assert {name for name, what in SERVICES.items() if network in what.get("networks", ())} == {
            site,
            "gate",
        }
