"""What is known of a federation: by its SuperLink, by the folders of its runs, and by its certificate."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path

from click import ClickException
from click.exceptions import Exit
from filelock import FileLock, Timeout
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.run import Run
from safetensors import safe_open

from protofl_common.config.options import SettingsError
from protofl_common.run_folder import METRICS, TROUBLE, RunFolder
from protofl_common.tools.superlink_tls import Shown, shown_by

SUBMISSIONS = 10
"""The latest, of which a line is shown."""
SETTINGS, CHECKPOINTS = "settings.toml", "checkpoints"


@dataclass(frozen=True)
class Federation:
    """The answers of a SuperLink."""

    nodes: list[NodeInfo]
    submissions: list[Run]
    """The latest first."""
    shown: Shown


def ask(name: str) -> Federation:
    """What the SuperLink ``name`` of Flower's configuration says; SettingsError if there is none, or no answer."""
    try:
        connection = read_superlink_connection(name)
        if not connection.address:
            raise SettingsError(f"{name}: has no address in Flower's config.toml; a SuperLink of its own shows nothing")
        with redirect_stdout(sys.stderr):  # it says which SuperLink it uses
            client = init_http_client_from_connection(connection)
        try:
            with flwr_cli_exc_handler():
                nodes = client.ListNodes(ListNodesRequest()).nodes_info
                runs = client.ListRuns(ListRunsRequest(limit=SUBMISSIONS)).run_dict.values()
        finally:
            client.close()
        shown = shown_by(connection.address, connection.root_certificates or "")
    except ClickException as error:
        raise SettingsError(f"{name}: {error.format_message()}") from error
    except (Exit, OSError, ValueError) as error:
        raise SettingsError(f"{name}: the SuperLink cannot be asked ({error})") from error
    found = sorted(map(run_from_proto, runs), key=lambda run: str(run.pending_at), reverse=True)
    return Federation([node for node in nodes if node.status != "unregistered"], found, shown)


@dataclass
class KnownSite:
    """What a run says of a site."""

    node: int
    last: int = 0
    """The round of its last valid reply; 0: none."""
    trouble: dict[str, int] = field(default_factory=dict)
    """Kind of trouble -> how often."""
    reason: str = ""
    """Of the latest."""


@dataclass(frozen=True)
class KnownRun:
    """A run's folder."""

    folder: Path

    @property
    def age(self) -> float:
        """Seconds since its last round."""
        return time.time() - (self.folder / METRICS).stat().st_mtime

    @property
    def finished(self) -> bool:
        """Whether it has made its final evaluation."""
        return RunFolder(self.folder).summary() is not None

    @property
    def goes_on(self) -> bool:
        """Whether a process is at work on it."""
        lock = self.folder.parent / f".{self.folder.name}.lock"
        with suppress(Timeout), FileLock(lock, timeout=0) if lock.exists() else nullcontext():
            return False
        return True

    @property
    def rounds(self) -> tuple[int, int]:
        """Of which there are checkpoints, and how many there shall be."""
        wanted = tomllib.loads((self.folder / SETTINGS).read_text(encoding="utf-8"))["rounds"]
        return max((int(path.stem) for path in self._checkpoints()), default=0), int(wanted)

    def sites(self) -> dict[str, KnownSite]:
        """All that have taken part, by name."""
        newest = max(self._checkpoints(), default=None)
        found = dict[str, KnownSite]()
        if newest:
            with safe_open(newest, framework="numpy") as file:
                owners = json.loads(file.metadata()["facts"])["owners"]
            found = {site: KnownSite(node) for site, node in owners.items()}
        for row in RunFolder(self.folder).rows():
            for site in row["clients"]:
                found.setdefault(site, KnownSite(0)).last = row["round"]
            for kind in TROUBLE:
                told = row[kind]
                reasons = told if isinstance(told, dict) else dict.fromkeys(told, "no answer in time")
                for site, reason in reasons.items():
                    known = found.setdefault(site, KnownSite(0))
                    known.trouble[kind] = known.trouble.get(kind, 0) + 1
                    known.reason = f"round {row['round']}: {reason}"
        return found

    def _checkpoints(self) -> Iterator[Path]:
        return (path for path in (self.folder / CHECKPOINTS).glob("*.safetensors") if path.stem.isdigit())


def runs_in(folder: Path) -> list[KnownRun]:
    """The runs in a folder of results, the latest first."""
    found = [KnownRun(path.parent) for path in folder.glob(f"*/{METRICS}") if (path.parent / SETTINGS).exists()]
    return sorted(found, key=lambda run: run.age)
