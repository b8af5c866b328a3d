"""A federation: what its SuperLink answers, and the certificate and clock that it, or the door before it, shows."""

import ssl
import sys
import time
from contextlib import closing, redirect_stdout
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple

from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.run import Run

from protofl_common.config.options import SettingsError

SUBMISSIONS, PATIENCE, FEW_DAYS = 10, 10.0, 30  # the latest, with a line each; seconds; days left of a certificate


class Shown(NamedTuple):
    days: int | None  # until the certificate ends; None without TLS
    ahead: float  # seconds that this machine's clock is ahead of its


class Federation(NamedTuple):
    nodes: list[NodeInfo]
    submissions: list[Run]  # the latest first
    shown: Shown


def ask(name: str) -> Federation:
    """Ask the SuperLink ``name`` of Flower's configuration; SettingsError if there is none, or no answer."""
    from click import ClickException  # Flower's command line takes a second to import
    from click.exceptions import Exit
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection

    try:
        if not (connection := read_superlink_connection(name)).address:
            raise SettingsError(f"{name}: has no address in Flower's config.toml; a SuperLink of its own shows nothing")
        shown = shown_by(connection.address, connection.root_certificates or "")  # first: it says why it fails
        with redirect_stdout(sys.stderr):  # it says which SuperLink it uses
            client = init_http_client_from_connection(connection)
        with closing(client), flwr_cli_exc_handler():
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
            runs = client.ListRuns(ListRunsRequest(limit=SUBMISSIONS)).run_dict.values()
    except ClickException as error:
        raise SettingsError(f"{name}: {error.format_message()}") from error
    except (Exit, OSError, ValueError) as error:
        cure = "; renew its certificate as docs/operations.md says" * isinstance(error, ssl.SSLCertVerificationError)
        raise SettingsError(f"{name}: the SuperLink cannot be asked ({error}){cure}") from error
    latest = sorted(map(run_from_proto, runs), key=lambda run: str(run.pending_at), reverse=True)
    return Federation([node for node in nodes if node.status != "unregistered"], latest, shown)


def shown_by(address: str, root_certificates: str = "") -> Shown:
    """Ask HOST:PORT, by TLS if there are ``root_certificates``; OSError (SSLError) without a (trusted) answer."""
    host, _, port = address.replace("[", "").replace("]", "").rpartition(":")  # brackets of an IPv6 address
    connection: HTTPConnection = HTTPConnection(host, int(port), timeout=PATIENCE)
    if root_certificates:
        trusted = ssl.create_default_context(cafile=root_certificates)
        connection = HTTPSConnection(host, int(port), timeout=PATIENCE, context=trusted)
    try:
        connection.connect()
        certificate = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        connection.request("GET", "/health")
        date = connection.getresponse().getheader("Date")
    except HTTPException as error:
        raise OSError(f"no HTTP: {type(error).__name__}") from error
    finally:
        connection.close()
    days = int((ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) // 86400) if certificate else None
    return Shown(days, time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0)
