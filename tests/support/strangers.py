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
CHUNK = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
IDLE, SLOW = 1000, 100


class Strangers:
    """What they do at the same time; ``answers`` counts (kind, status), with the status "" where they were cut off."""

    def __init__(self, door: int, authority: Path) -> None:
        self.door, self.answers = door, Counter[tuple[str, str]]()
        self.tls = ssl.create_default_context(cafile=str(authority))
        self.tls.check_hostname = False
        self.hosts = cycle(f"127.1.0.{number}" for number in range(1, 26))

    async def press(self) -> None:
        """1,000 idle connections, 100 slow requests, bodies of 1 GB; they begin again when they are refused."""
        slow = {
            "head": HEAD[:20],
            "body": LENGTH % 9_000,
            "upload": LENGTH % 5_000_000 + b"x" * 20_000,
        }
        large = {"length": LENGTH % 10**9, "chunks": HEAD + b"transfer-encoding: chunked\r\n\r\n"}
        asked = [self.ask("idle", b"", b"", tls=None) for _ in range(IDLE)]
        asked += [
            self.ask(kind, start, b"x")
            for kind, start in slow.items()
            for _ in range(SLOW // len(slow) + 1)
        ]
        asked += [self.ask(kind, start, CHUNK, times=1000) for kind, start in large.items()]
        await asyncio.gather(*asked)

    async def ask(
        self, kind: str, start: bytes, more: bytes, times: int = 10**9, tls: bool = True
    ) -> None:
        """Send ``start``, and then ``more`` every second, or ``times`` as fast as it goes, until there is an answer."""
        while True:
            with suppress(OSError):
                await self._once(kind, start, more, times, self.tls if tls else None)
            await asyncio.sleep(1)

    async def _once(
        self, kind: str, start: bytes, more: bytes, times: int, tls: ssl.SSLContext | None
    ) -> None:
        local = (next(self.hosts), 0)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.door, ssl=tls, local_addr=local
        )
        answer = asyncio.ensure_future(reader.read(12))
        try:
            writer.write(start)
            for _ in range(times):
                writer.write(more)
                await writer.drain()
                await asyncio.wait([answer], timeout=0 if len(more) > 1 else 1)
                if answer.done():
                    break
            self.answers[kind, (await answer)[9:].decode()] += 1
        finally:
            answer.cancel()
            writer.close()


@contextmanager
def strangers_at(door: int, authority: Path) -> Iterator[Counter[tuple[str, str]]]:
    """They press while the block lasts."""
    strangers, loop = Strangers(door, authority), asyncio.new_event_loop()
    pressing = loop.create_task(strangers.press())
    thread = threading.Thread(target=loop.run_until_complete, args=[asyncio.wait([pressing])])
    thread.start()
    try:
        yield strangers.answers
    finally:
        loop.call_soon_threadsafe(pressing.cancel)
        thread.join()
        loop.close()
