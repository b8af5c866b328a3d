"""A federation: its SuperLink and its certificate; `known_runs` has the folders of its runs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from click import ClickException
from click.exceptions import Exit
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.run import Run

from protofl_common.config.options import SettingsError
from protofl_common.tools.superlink_tls import Shown, shown_by

SUBMISSIONS = 10
"""The latest, of which a line is shown."""


@dataclass(frozen=True)
class Federation:
    """The answers of a SuperLink."""

    nodes: list[NodeInfo]
    submissions: list[Run]
    """The latest first."""
    shown: Shown


def ask(name: str) -> Federation:
    """Ask the SuperLink ``name`` of Flower's configuration; SettingsError if there is none, or no answer."""
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
