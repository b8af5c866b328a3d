"""The compose file as text: what each container may do, and whose keys it has. `test_docker.py` brings it up."""

from typing import Any

import pytest
import yaml

from tests.support import ROOT

FILE = ROOT / "docker" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]


def mounts(service: str) -> dict[str, str]:
    """Volume -> where, with ``:ro`` where it cannot be written."""
    return dict(entry.split(":", 1) for entry in SERVICES[service].get("volumes", ()))


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_can_do_no_more_than_it_must(service: str) -> None:
    what = SERVICES[service]
    assert what["cap_drop"] == ["ALL"]
    assert set(what.get("cap_add", ())) == ({"CHOWN", "DAC_OVERRIDE", "FOWNER"} if service == "init" else set())
    assert what["security_opt"] == ["no-new-privileges:true"]
    assert what["read_only"]
    assert what["tmpfs"] == ["/tmp"]
    assert {"mem_limit", "pids_limit", "ulimits"} <= what.keys()
    assert {"max-size", "max-file"} <= what["logging"]["options"].keys()
    assert ("user" in what) == (service == "init")
    assert not {"privileged", "ports", "devices", "pid", "ipc"} & what.keys()


def test_each_role_has_its_own_keys_and_cannot_change_them() -> None:
    for service in set(SERVICES) - {"init"}:
        keys = {volume: where for volume, where in mounts(service).items() if volume.startswith("keys-")}
        role = "operator" if service == "register" else service
        assert keys == {f"keys-{role}": "/keys:ro"}
        assert "authority" not in mounts(service)
    assert SERVICES["init"]["network_mode"] == "none"


def test_a_site_meets_nobody_but_the_door() -> None:
    for site in ("north", "south", "east"):
        (network,) = SERVICES[site]["networks"]
        assert {name for name, what in SERVICES.items() if network in what.get("networks", ())} == {site, "gate"}
