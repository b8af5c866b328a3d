"""The README's commands on three hosts with addresses of their own.

The hosts are network namespaces, outside of which everything stays as it is.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import HAPROXY, SITES, Machines
from tests.support.processes import wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(
        os.environ.get("PROTOFL_HOSTS") != "1" or os.geteuid() != 0 or not HAPROXY.exists(),
        reason="needs PROTOFL_HOSTS=1, root, and HAProxy",
    ),
]

ADDRESSES = {"superlink": "10.77.0.1", "north": "10.77.0.2", "south": "10.77.0.3"}
CUT = 20.0
"""Seconds without a link."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Hosts(Machines):
    """Machines with their own addresses, and so with the README's own ports."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        """Make a network namespace for each host and for a switch, and cables between them."""
        self.name = f"protofl{os.getpid()}"
        self._namespace("switch", running)
        ip("-n", f"{self.name}-switch", "link", "add", "bridge", "type", "bridge")
        ip("-n", f"{self.name}-switch", "link", "set", "bridge", "up")
        for host, address in ADDRESSES.items():
            self._namespace(host, running)
            here = f"{self.name}-{host}"
            there = f"{self.name}-switch"
            # a cable: its end at the host is called uplink, its end at the switch as the host
            cable = f"link add uplink type veth peer name {host} netns {there}"
            ip("-n", here, *cable.split())
            ip("-n", here, "address", "add", f"{address}/24", "dev", "uplink")
            ip("-n", here, "link", "set", "uplink", "up")
            ip("-n", there, "link", "set", host, "master", "bridge", "up")
        super().__init__(folder, running)

    def _namespace(self, host: str, running: ExitStack) -> None:
        """Make a network namespace, with loopback, until the test ends."""
        ip("netns", "add", f"{self.name}-{host}")
        running.callback(ip, "netns", "delete", f"{self.name}-{host}")
        ip("-n", f"{self.name}-{host}", "link", "set", "lo", "up")

    def _ports(self) -> tuple[int, int]:
        return 8001, 8000

    def _substitutions(self, machine: str) -> dict[str, str]:
        """Return fewer changes of the README's blocks: ports and addresses are its own here."""
        substitutions = {
            "superlink.example.org": ADDRESSES["superlink"],
            "rounds=2": "rounds=4 threads=1",
        }
        kept = ("/data/", 'device="cuda"', "north", 'arch="cnn4"', 'classes="benign,malignant"')
        for key, value in super()._substitutions(machine).items():
            if key in kept:
                substitutions[key] = value
        return substitutions

    def on(self, machine: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self.name}-{machine}"]

    def link(self, host: str, state: str) -> None:
        """Set a host's link ``up`` or ``down``, at the switch's end of the cable."""
        ip("-n", f"{self.name}-switch", "link", "set", host, state)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Do what the README says up to its chapter "A run"; yield the hosts."""
    with ExitStack() as running:
        hosts = Hosts(tmp_path_factory.mktemp("hosts"), running)
        hosts.set_up()
        yield hosts


def status_of_the_run(hosts: Hosts) -> str:
    """Return the status that ``flwr ls`` gives the last run."""
    newest, *_ = hosts.runs()
    return str(newest["status"])


def test_a_cut_link_does_not_end_the_run(hosts: Hosts) -> None:
    """South has no link for 20 seconds from round 1 on, and counts in the end."""
    config = 'algo="fedtgp" rounds=4 threads=1 partition="own" image-size=28 num-clients=2'
    hosts.step("superlink", f"flwr run . federation --run-config '{config} run-name=\"cut\"'")
    metrics = hosts.checkout("superlink") / "runs" / "cut" / "metrics.jsonl"

    def rounds() -> list[dict[str, Any]]:
        if not metrics.exists():
            return []
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    def is_finished() -> bool:
        return status_of_the_run(hosts).startswith("finished")

    wait_until(rounds, hosts.logs)
    hosts.link("south", "down")
    time.sleep(CUT)
    rounds_when_link_came_back = len(rounds())
    hosts.link("south", "up")
    wait_until(is_finished, hosts.logs, timeout=500, pause=2)
    assert status_of_the_run(hosts) == "finished:completed", hosts.logs()
    # round 2 waits for south, unless its reply had been sent before the cut; then round 3 does
    assert rounds_when_link_came_back <= 2
    *_, final = rounds()
    assert final["valid"] == len(SITES)
    print([(row["round"], row["valid"], row["seconds"]["total"]) for row in rounds()])


def test_sites_reach_only_the_door(hosts: Hosts) -> None:
    """The SuperLink itself listens on its own machine's loopback interface."""
    check = "SSL_CERT_FILE=certs/ca.crt python docker/health.py"

    def status_at(port: int) -> int:
        """Return the exit status of north's check of a port of the SuperLink's machine."""
        url = f"https://superlink.example.org:{port}/health"
        return hosts.run("north", f"HEALTH_URLS={url} {check}").returncode

    assert status_at(8000) == 0
    assert status_at(8001) == 1
