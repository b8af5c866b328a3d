"""The certificate and the clock that a SuperLink, or the door in front of it, shows to whoever connects."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection

PATIENCE = 10.0
"""Seconds."""


@dataclass(frozen=True)
class Shown:
    """At one address."""

    days: int | None
    """Until the certificate ends; None without TLS."""
    ahead: float
    """Seconds that this machine's clock is ahead of its."""


def shown_by(address: str, root_certificates: str = "") -> Shown:
    """Ask ``address`` (HOST:PORT), by TLS if there are ``root_certificates`` of a file.

    OSError if nobody answers, or, as ssl.SSLError, with a certificate that is none for this name and authority.
    """
    host, _, port = address.rpartition(":")
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
