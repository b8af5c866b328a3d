"""A SuperLink for simulations of our own: private home, free ports, ended with all that it started.

The one place that knows how Flower must be started here:

- no installation of an app's dependencies (Flower would install PyTorch again for every run);
- a Flower home and ports of its own, so that it meets no SuperLink of yours, nor another `protofl` beside it;
- a Ray of its own, unless RAY_ADDRESS names one: without it a simulation waits for ever for the last cluster that
  `ray start` noted on this machine, even when that has been killed;
- it works in the current folder, which ``out-dir``, ``data-dir`` and the workers' imports are relative to.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from protofl_common.basics.code_version import COMMIT, commit
from protofl_common.basics.text import printable
from protofl_common.config.options import SettingsError
from protofl_common.tools.app_files import copy_app
from protofl_common.tools.cli.recipes import ROOT

BIN = Path(sys.executable).parent
START_SECONDS = 120.0
STOP_SECONDS = 20.0
GUARD = f"""
trap '' TERM INT HUP
cat > /dev/null
groups="$0 $(ps -o pgid= --ppid $0)"
for signal in TERM KILL; do
    for group in $groups; do kill -s $signal -- -$group 2> /dev/null; done
    for moment in $(seq {5 * STOP_SECONDS:.0f}); do
        for group in $groups; do kill -s 0 -- -$group 2> /dev/null && sleep 0.2 && continue 2; done
        break
    done
done
rm -rf "$1"
"""
"""Ends the SuperLink $0 and its run's processes, and removes its home $1, once its input ends: when whoever started it
says so, or is no more, however killed."""


class SuperLink:
    """Started by ``with``; `environment` is what ``flwr`` needs to find it, `app` the app for ``flwr run``.

    ``ray``: the address of a Ray to simulate on.
    """

    def __init__(self, ray: str = "") -> None:
        self.home = Path(tempfile.mkdtemp(prefix="protofl-"))
        self.app = copy_app(ROOT, self.home / "app")
        self.port, control = _free_ports()
        self.environment = {
            "FLWR_HOME": str(self.home),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(self.port),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": os.environ.get("FLWR_TELEMETRY_ENABLED", "0"),
            COMMIT: commit(),
            "RAY_ADDRESS": ray or os.environ.get("RAY_ADDRESS", "local"),
        }
        self.log = self.home / "superlink.log"
        command = [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--control-api-address", f"127.0.0.1:{control}"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--disable-runtime-dependency-installation"],
                env=self.full_environment,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        guard = ["sh", "-c", GUARD, str(self._process.pid), str(self.home)]
        none = subprocess.DEVNULL
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=none, stderr=none, process_group=0)

    @property
    def full_environment(self) -> dict[str, str]:
        """This process's environment with the SuperLink's, and this Python's commands first."""
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        return os.environ | self.environment | {"PATH": path, "PYTHONUNBUFFERED": "1"}

    @property
    def alive(self) -> bool:
        """Return whether its process goes on."""
        return self._process.poll() is None

    def __enter__(self) -> SuperLink:
        if others := other_people():
            names = printable(", ".join(others[:3]) + (" …" if len(others) > 3 else ""))
            risk = "while this goes on, they can have code of theirs run as you, at its SuperLink's port"
            print(f"protofl: warning: others have accounts on this machine ({names}): {risk}", file=sys.stderr)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and what it started, and remove its home."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._process.wait()
        self._guard.wait()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.alive:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            time.sleep(0.3)
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise SettingsError("the SuperLink did not start; its log ends with\n" + "\n".join(said))


def other_people() -> list[str]:
    """Names of other users of this machine who can log in; a SuperLink's port on the loopback is open to them all."""
    people = [user for user in pwd.getpwall() if 1000 <= user.pw_uid < 60_000 and user.pw_uid != os.geteuid()]
    return [user.pw_name for user in people if not user.pw_shell.endswith(("nologin", "false"))]


def _free_ports() -> tuple[int, int]:
    """Two ports nobody listens on just now."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
