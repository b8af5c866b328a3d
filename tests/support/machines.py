"""The machines of a federation, and the README of separate machines as what is run on them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from tests.support import ROOT
from tests.support.processes import BIN, approving, free_port, process, wait_until

README = ROOT / "docker" / "README.md"
SITES = {"north": "cnn4", "south": "htcnn-3"}
HAPROXY = Path("/usr/sbin/haproxy")
"""The door. Where it is not installed, sites reach the SuperLink without one."""


@dataclass(frozen=True)
class Block:
    """A fenced block: ``sh MACHINE`` is a step, ``sh MACHINE service`` runs until the test ends."""

    machine: str
    service: bool
    text: str


def blocks_of(readme: Path) -> list[Block]:
    """Return all ``sh MACHINE`` blocks of a page, in order."""
    fenced = r"^```sh (\w+)( service)?\n(.*?)^```$"
    found = re.findall(fenced, readme.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(machine, bool(service), text) for machine, service, text in found]


class Machines:
    """The SuperLink's machine and the sites', as folders with a home and a checkout each."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self.running = running
        self.superlink, self.door = self._ports()
        self.settings = {site: self._substitutions(site) for site in ("superlink", *SITES)}
        self.services = {machine: running.enter_context(ExitStack()) for machine in self.settings}
        folders = {site: self.checkout(site) / "state" / "sites" / site for site in SITES}
        running.enter_context(approving(folders, self.approve))
        for machine in self.settings:
            copy_checkout(self.checkout(machine))

    def _ports(self) -> tuple[int, int]:
        """Return the ports of the SuperLink and of the door; without a door they are one."""
        superlink = free_port()
        if HAPROXY.exists():
            return superlink, free_port()
        return superlink, superlink

    def _substitutions(self, machine: str) -> dict[str, str]:
        """Return text in the README's blocks -> what a test on one computer runs in its place.

        The README shows one site, north, so the other site runs north's blocks under its own name.
        """
        substitutions = {
            "superlink.example.org": "localhost",
            "0.0.0.0:8000": f"127.0.0.1:{self.door}",
            ":8000": f":{self.door}",
            "8001": str(self.superlink),
            "9094": str(free_port()),
            "/data/": f"{self.folder}/data/",
            "rounds=2": "rounds=2 threads=1",
            'classes="benign,malignant"': 'classes="0,1,2,3,4,5,6,7,8,9"',
        }
        if machine in SITES:
            substitutions["north"] = machine
            substitutions['arch="cnn4"'] = f'arch="{SITES[machine]}"'
        return substitutions

    def checkout(self, machine: str) -> Path:
        """Where a machine's commands run."""
        return self.folder / machine / "protofl"

    def environment(self, machine: str) -> dict[str, str]:
        """A home of its own, and this virtual environment's commands."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
        env["HOME"] = str(self.folder / machine)
        env["XDG_CACHE_HOME"] = f"{env['HOME']}/.cache"
        env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
        env["PYTHONPATH"] = str(self.checkout(machine))  # in place of its own `pip install -e .`
        env["OMP_NUM_THREADS"] = "1"
        return env

    def script(self, machine: str, text: str) -> list[str]:
        """Return the command that runs a block on a machine, with that machine's names and ports.

        On the SuperLink's machine the README's ``preamble`` block, which sets variables, goes
        before each.
        """
        for before, after in self.settings[machine].items():
            text = text.replace(before, after)
        if machine == "superlink":
            (preamble,) = [block.text for block in blocks_of(README) if block.machine == "preamble"]
            text = preamble + text
        return [*self.on(machine), "sh", "-euc", text]

    def on(self, machine: str) -> list[str]:
        """What precedes a command that runs on a machine."""
        return []

    def run(
        self, machine: str, text: str, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run a block on a machine to its end."""
        place = {"cwd": self.checkout(machine), "env": self.environment(machine)}
        command = self.script(machine, text)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **place)

    def serve(self, machine: str, text: str) -> None:
        """Start a block as a service of a machine, whose log is ``<machine>-<number>.log``.

        The block of the door is left out where HAProxy is not installed.
        """
        if str(HAPROXY) in text and not HAPROXY.exists():
            return
        number = len(list(self.folder.glob(f"{machine}-*.log")))
        log = self.folder / f"{machine}-{number}.log"
        self.services[machine].enter_context(self._started(machine, text, log))

    def _started(
        self, machine: str, text: str, log: Path
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        command = self.script(machine, text)
        return process(command, self.environment(machine), log, cwd=self.checkout(machine))

    def restart(self, meanwhile: Callable[[], None]) -> None:
        """Stop all services, do something, and start them again as the README does."""
        for stopped in self.services.values():
            stopped.close()
        meanwhile()
        services = [block for block in blocks_of(README) if block.service]
        for machine in self.services:
            for block in services:
                if (block.machine == "superlink") == (machine == "superlink"):
                    self.serve(machine, block.text)
        self.wait_for(self.door)

    def run_until_it_ends(self, machine: str, text: str, log: Path) -> tuple[int, str]:
        """Start a service that ends by itself in a minute; return its exit status and output."""
        with self._started(machine, text, log) as service:
            status = service.wait(timeout=60)
        return status, log.read_text()

    def carry(self, source: str, target: str, name: str) -> None:
        """Copy a file of ``certs`` from one machine to another."""
        goal = self.checkout(target) / "certs" / name
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.checkout(source) / "certs" / name, goal)

    def wait_for(self, port: int) -> None:
        """Wait until a port of the SuperLink's machine answers ``/health``."""
        check = f"HEALTH_URLS=https://127.0.0.1:{port}/health "
        check += "SSL_CERT_FILE=certs/ca.crt python docker/health.py"
        wait_until(lambda: self.run("superlink", check).returncode == 0, self.logs, timeout=60)

    def step(self, machine: str, text: str) -> None:
        """Run a block on a machine; it must succeed."""
        done = self.run(machine, text)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}\n{self.logs()}"

    def approve(self, site: str, study: str) -> None:
        """Type what a site's operator types when a run waits for approval."""
        self.step(site, f"protofl site approve {study} --node-config north.toml")

    def set_up(self) -> None:
        """Do what the README says up to its chapter "A run".

        Each site has 300 images of its own.
        """
        for number, site in enumerate(SITES):
            own_rows = slice(300 * number, 300 * (number + 1))
            write_digits(self.folder / "data" / site / "ward", own_rows)

        *setup, _run = [block for block in blocks_of(README) if block.machine != "preamble"]
        for block in setup:
            if block.machine == "north":
                for site in SITES:
                    self._set_up_site(site, block)
            elif block.service:
                self.serve("superlink", block.text)
            elif "supernode register" in block.text:
                self.wait_for(self.superlink)
                self.wait_for(self.door)
                for site in SITES:
                    self.step("superlink", block.text.replace("north", site))
            else:
                self.step("superlink", block.text)

    def _set_up_site(self, site: str, block: Block) -> None:
        if block.service:
            self.serve(site, block.text)
        else:
            self.step(site, block.text)
        makes_node_key = "--node " in block.text
        if makes_node_key:  # people send each other these two files
            self.carry("superlink", site, "ca.crt")
            self.carry(site, "superlink", f"nodes/{site}.pub")

    def runs(self) -> list[dict[str, Any]]:
        """The runs as ``flwr ls`` lists them, the latest first."""
        listed = self.run("superlink", "flwr ls federation --format json")
        runs: list[dict[str, Any]] = json.loads(listed.stdout)["runs"]
        return runs

    def logs(self) -> str:
        """The last lines of every service."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)


def copy_checkout(target: Path) -> None:
    """Copy those files of the project with which it can be run and submitted."""
    for name in ("client_app", "server_app", "protofl_common", "configs", "docker"):
        ignored = shutil.ignore_patterns("__pycache__", "extra")
        shutil.copytree(ROOT / name, target / name, ignore=ignored, dirs_exist_ok=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, target)


def changed_checkout(target: Path) -> Path:
    """Copy a checkout to ``target``, and add to both halves a line that tells if they ever run.

    The line makes the file ``was-here`` in the Flower home of the process that imports the half.
    """
    copy_checkout(target)
    added = "\nimport os, pathlib; pathlib.Path(os.environ['FLWR_HOME'], 'was-here').touch()\n"
    for half in ("client_app", "server_app"):
        with (target / half / "app.py").open("a") as code:
            code.write(added)
    return target


def write_digits(folder: Path, rows: slice, classes: int = 10) -> None:
    """Write these rows of scikit-learn's digits as ``CLASS/INDEX.png``, enlarged to 28×28."""
    digits = load_digits(n_class=classes)
    labels = digits.target[rows]
    for index, digit in enumerate(digits.images[rows]):
        path = folder / str(labels[index]) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (digit * 15.9).astype(np.uint8)  # 0 to 16 becomes 0 to 254
        Image.fromarray(pixels).resize((28, 28)).save(path)
