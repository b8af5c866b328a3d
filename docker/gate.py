"""The door for SuperNodes: of the SuperLink's one port, it lets only SuperNode traffic through.

    python docker/gate.py --listen 0.0.0.0:8000 --superlink 127.0.0.1:8001 --certificates certs

Flower 1.41 serves three interfaces on one port. Only one of them, that of the SuperNodes, asks who is calling
(``--enable-supernode-auth``): whoever reaches the port may submit runs, and may register a key of their own. So the
SuperLink listens where only its operator comes, and this process stands outside, with the same certificate.
It keeps nothing and admits nobody: SuperNodes authenticate themselves to the SuperLink, through it.

It also saves them a wait. A SuperNode asks for work right after each reply, a moment before the next round's message is
there; told that there is none, it sleeps 3 s. So the door repeats the question for ``--patience`` seconds before it
passes on a no.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import PullMessagesResponse

OPEN = re.compile(r"/health|/v1/fleet/[a-z-]+")
"""The paths that are let through; each is passed on exactly as it is matched here."""

QUESTION = "/v1/fleet/pull-messages"
"""Whether there is work."""
PAUSE = 0.2
"""Seconds before it is asked again."""

NOT_PASSED_ON = frozenset(
    (b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"accept-encoding")
)
"""Headers between two neighbours, not between the two ends; answers are asked for uncompressed."""

Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Gate:
    """The ASGI application; ``client`` knows the SuperLink's address and how to recognise it."""

    def __init__(self, client: httpx.AsyncClient, patience: float) -> None:
        self.client, self.patience = client, patience

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One request, streamed in both directions."""
        if not OPEN.fullmatch(scope["path"]) or scope["query_string"]:
            await _answer(send, 404)
            return
        try:
            response = await self._ask(scope, receive)
        except httpx.TransportError:
            await _answer(send, 502)  # a SuperNode tries again
            return
        try:
            headers = _passed_on(response.headers.raw)
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for part in response.aiter_bytes():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    async def _ask(self, scope: dict[str, Any], receive: Receive) -> httpx.Response:
        """What the SuperLink answers; the question for work is repeated while there is none."""
        method, path, headers = scope["method"], scope["path"], _passed_on(scope["headers"])
        if path != QUESTION:
            request = self.client.build_request(method, path, headers=headers, content=_body(receive))
            return await self.client.send(request, stream=True)
        question = b"".join([part async for part in _body(receive)])
        deadline = time.monotonic() + self.patience
        response = await self.client.request(method, path, headers=headers, content=question)
        while _nothing_to_do(response) and time.monotonic() < deadline:
            await asyncio.sleep(PAUSE)
            response = await self.client.request(method, path, headers=headers, content=question)
        return response


def _nothing_to_do(response: httpx.Response) -> bool:
    return response.status_code == 200 and not PullMessagesResponse.FromString(response.content).messages_list


def _passed_on(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in NOT_PASSED_ON]


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise httpx.ReadError("the caller has gone")
        if part := message.get("body", b""):
            yield part
        if not message.get("more_body", False):
            return


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Lets only SuperNode traffic through to a SuperLink.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where SuperNodes come")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="where the SuperLink listens")
    parser.add_argument(
        "--certificates", required=True, type=Path, metavar="FOLDER", help="with ca.crt, server.crt, server.key"
    )
    parser.add_argument(
        "--patience", type=float, default=5.0, metavar="SECONDS", help="how long work is asked for (default 5)"
    )
    options = parser.parse_args()
    folder: Path = options.certificates
    host, _, port = options.listen.rpartition(":")
    client = httpx.AsyncClient(
        base_url=f"https://{options.superlink}",
        verify=ssl.create_default_context(cafile=str(folder / "ca.crt")),
        timeout=httpx.Timeout(60.0, pool=None),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),  # the SuperLink hangs up after 5
        headers={"accept-encoding": "identity"},
        trust_env=False,
    )
    uvicorn.run(
        Gate(client, options.patience),
        host=host.strip("[]"),
        port=int(port),
        ssl_certfile=folder / "server.crt",
        ssl_keyfile=str(folder / "server.key"),
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=5,
    )


if __name__ == "__main__":
    main()
