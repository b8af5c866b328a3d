"""Strangers at the door of a federation: they have no key, and try to use up what it has."""

import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

HEAD = (
    b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: door\r\ncontent-type: application/protobuf\r\n"
)
LENGTH = HEAD + b"content-length: %d\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
CHUNK = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
IDLE, SLOW = 1000, 100

SLOW_REQUESTS = {
    "head": HEAD[:20],
    "body": LENGTH % 9_000,
    "upload": LENGTH % 5_000_000 + b"x" * 20_000,
}
"""Kind -> what it begins with; then comes one byte a second."""
LARGE_REQUESTS = {"length": LENGTH % 10**9, "chunks": CHUNKED}
"""Kind -> what it begins with; then comes 1 GB."""


class Strangers:
    """What they do at the same time, and what they are answered."""

    def __init__(self, door: int, authority: Path) -> None:
        """Let strangers come to the port ``door``, whose certificate is of this authority."""
        self.door = door
        self.answers = Counter[tuple[str, str]]()
        """Counts (kind, status), with the status "" where they were cut off."""
        self.tls = ssl.create_default_context(cafile=str(authority))
        self.tls.check_hostname = False
        # each of 25 addresses keeps below the door's limit of 100 connections from one
        self.hosts = cycle(f"127.1.0.{number}" for number in range(1, 26))

    async def press(self) -> None:
        """Hold 1,000 idle connections, make 100 slow requests, and send two bodies of 1 GB.

        Whoever is refused begins again.
        """
        requests = [self.ask("idle", b"", b"", tls=False) for _ in range(IDLE)]
        for kind, start in SLOW_REQUESTS.items():
            of_each = SLOW // len(SLOW_REQUESTS) + 1
            requests += [self.ask(kind, start, b"x") for _ in range(of_each)]
        for kind, start in LARGE_REQUESTS.items():
            requests.append(self.ask(kind, start, CHUNK, times=1000))
        await asyncio.gather(*requests)

    async def ask(
        self, kind: str, start: bytes, then: bytes, times: int = 10**9, tls: bool = True
    ) -> None:
        """Send ``start`` and then ``then`` up to ``times``, until an answer comes; begin again.

        A ``then`` of a single byte, or of none, is sent every second, a longer one without a pause.
        """
        while True:
            with suppress(OSError):
                await self._ask_once(kind, start, then, times, self.tls if tls else None)
            await asyncio.sleep(1)

    async def _ask_once(
        self, kind: str, start: bytes, then: bytes, times: int, tls: ssl.SSLContext | None
    ) -> None:
        """Make one connection to the door, and count its answer."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.door, ssl=tls, local_addr=(next(self.hosts), 0)
        )
        answer = asyncio.ensure_future(reader.read(12))
        pause = 0 if len(then) > 1 else 1
        try:
            writer.write(start)
            for _ in range(times):
                writer.write(then)
                await writer.drain()
                await asyncio.wait([answer], timeout=pause)
                if answer.done():
                    break
            status = (await answer)[len("HTTP/1.1 ") :].decode()
            self.answers[kind, status] += 1
        finally:
            answer.cancel()
            writer.close()


@contextmanager
def strangers_at(door: int, authority: Path) -> Iterator[Counter[tuple[str, str]]]:
    """Let strangers press at a door while the block lasts; yield what they are answered so far."""
    strangers = Strangers(door, authority)
    loop = asyncio.new_event_loop()
    pressing = loop.create_task(strangers.press())
    thread = threading.Thread(target=loop.run_until_complete, args=[asyncio.wait([pressing])])
    thread.start()
    try:
        yield strangers.answers
    finally:
        loop.call_soon_threadsafe(pressing.cancel)
        thread.join()
        loop.close()
