"""What a SuperLink answers to a command, and the certificate and clock that it shows.

Where a reverse proxy stands before the SuperLink, these are the proxy's.
"""

import ssl
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple

from protofl_common.config.options import SettingsError
from protofl_common.tools.flower import (
    ListNodesRequest,
    ListRunsRequest,
    NodeInfo,
    Run,
    client_of,
    run_from_proto,
    superlink_named,
)

SUBMISSIONS = 10  # the latest, with a line each
TIMEOUT_SECONDS = 10.0
SECONDS_PER_DAY = 86400
FEW_DAYS = 30  # left of a certificate: it should be renewed


class Endpoint(NamedTuple):
    days: int | None  # until the certificate ends; None without TLS
    ahead: float  # seconds that this machine's clock is ahead of the SuperLink's


class Federation(NamedTuple):
    nodes: list[NodeInfo]
    submissions: list[Run]  # the latest first
    endpoint: Endpoint


def ask(name: str) -> Federation:
    """Ask the SuperLink that Flower's configuration calls ``name`` for its nodes and latest runs.

    SettingsError if the configuration has none of this name, or the SuperLink does not answer.
    """
    from click import ClickException
    from click.exceptions import Exit

    try:
        superlink = superlink_named(name)
        if not superlink.address:
            raise ValueError("no address in config.toml; a SuperLink of its own shows nothing")
        # asked before Flower's client, whose error does not say why there is no answer
        endpoint = ask_endpoint(superlink.address, superlink.root_certificates or "")
        with client_of(superlink) as client:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        submissions = submissions_of(superlink, SUBMISSIONS)
    except ClickException as error:
        raise SettingsError(f"{name}: {error.format_message()}") from error
    except (Exit, OSError, ValueError) as error:
        cure = ""
        if isinstance(error, ssl.SSLCertVerificationError):
            cure = "; renew its certificate as docs/operations.md says"
        raise SettingsError(f"{name}: the SuperLink cannot be asked ({error}){cure}") from error

    registered = [node for node in nodes if node.status != "unregistered"]
    return Federation(registered, submissions, endpoint)


def submissions_of(superlink: Any, most: int) -> list[Run]:
    """Ask a SuperLink for the ``most`` runs submitted last, and return them, the latest first."""
    with client_of(superlink) as client:
        answer = client.ListRuns(ListRunsRequest(limit=most))
    runs = [run_from_proto(run) for run in answer.run_dict.values()]
    return sorted(runs, key=lambda run: str(run.pending_at), reverse=True)


def ask_endpoint(address: str, root_certificates: str = "") -> Endpoint:
    """Ask a SuperLink at HOST:PORT for its health; return what this shows of certificate and clock.

    If a file of ``root_certificates`` is given, ask by TLS, else by plain HTTP. OSError if nothing
    answers, SSLError for a certificate that these have not signed.
    """
    without_brackets = address.replace("[", "").replace("]", "")  # those of an IPv6 address
    host, _, port = without_brackets.rpartition(":")
    connection: HTTPConnection = HTTPConnection(host, int(port), timeout=TIMEOUT_SECONDS)
    if root_certificates:
        trusted = ssl.create_default_context(cafile=root_certificates)
        connection = HTTPSConnection(host, int(port), timeout=TIMEOUT_SECONDS, context=trusted)

    certificate = None
    try:
        connection.connect()
        if isinstance(connection.sock, ssl.SSLSocket):
            certificate = connection.sock.getpeercert()
        connection.request("GET", "/health")
        date = connection.getresponse().getheader("Date")
    except HTTPException as error:
        raise OSError(f"no HTTP: {type(error).__name__}") from error
    finally:
        connection.close()

    days = None
    if certificate:
        seconds_left = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()
        days = int(seconds_left // SECONDS_PER_DAY)
    ahead = 0.0
    if date:
        ahead = time.time() - parsedate_to_datetime(date).timestamp()
    return Endpoint(days, ahead)
