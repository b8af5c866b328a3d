"""A link between machines that is slow, far away, or broken: a relay on loopback."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

CHUNK = 1024  # bytes; at 64 kbit/s an eighth of a second


class Relay:
    """Passes on to the port ``target`` what comes to its own, late and slowly.

    ``delay`` is in seconds each way. ``rate`` is in bytes per second, of all connections together,
    each way. ``idle`` is the number of seconds after which a connection that is silent both ways is
    closed, as a door does. 0 is no limit. `cut` closes all connections. While the relay is ``held``
    nothing arrives, as when a cable is out.
    """

    def __init__(
        self, target: int, port: int, *, delay: float = 0, rate: float = 0, idle: float = 0
    ) -> None:
        self.target = target
        self.port = port
        self.delay = delay
        self.rate = rate
        self.idle = idle
        self.held = False
        self.bytes_up = 0
        self.connections = 0
        self.cuts = 0
        self._free_at = {"up": 0.0, "down": 0.0}  # When each way is free again, in the loop's time
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Relay":
        self._thread.start()
        start = asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self._server = self._in_loop(start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def cut(self) -> None:
        """Close all connections that are open now; new ones are accepted."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def has_sent(self, number: int) -> bool:
        """True if more than so many bytes have come from sites to the SuperLink."""
        return self.bytes_up > number

    # -- in the thread of the loop ---------------------------------------------------------------
    def _in_loop(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout=10)

    async def _end(self) -> None:
        """Accept nobody any more, and close all connections."""
        self._server.close()
        self._abort_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _abort_all(self) -> None:
        if self._open:
            self.cuts += 1
        for writer in self._open:
            writer.transport.abort()

    async def _accept(self, site: asyncio.StreamReader, to_site: asyncio.StreamWriter) -> None:
        """Connect a site to the SuperLink until one of them closes the connection."""
        self.connections += 1
        ends = {to_site}
        self._open |= ends
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self.target)
            ends.add(to_server)
            self._open |= ends
            ways = (self._pass(site, to_server, "up"), self._pass(server, to_site, "down"))
            tasks = {asyncio.ensure_future(way) for way in ways}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        except (OSError, asyncio.CancelledError):  # the SuperLink is down, or the relay ends
            pass
        finally:
            self._open -= ends
            for writer in ends:
                writer.close()

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str
    ) -> None:
        """Pass on what ``source`` sends until it ends; what is under way arrives before that."""
        on_its_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)
        arriving = asyncio.ensure_future(self._arrive(on_its_way, sink))
        try:
            while not arriving.done():
                data = await asyncio.wait_for(source.read(CHUNK), self.idle or None)
                if self.rate:  # the line is busy until this chunk is through
                    now = self._loop.time()
                    self._free_at[way] = max(now, self._free_at[way]) + len(data) / self.rate
                    await asyncio.sleep(self._free_at[way] - now)
                if way == "up":
                    self.bytes_up += len(data)
                await on_its_way.put((self._loop.time() + self.delay, data))
                if not data:
                    await arriving
        except (OSError, TimeoutError):
            pass
        finally:
            arriving.cancel()

    async def _arrive(
        self, on_its_way: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter
    ) -> None:
        """Write each chunk to ``sink`` when it is due; an empty one is the end."""
        with suppress(OSError):
            while True:
                due, data = await on_its_way.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                while self.held:
                    await asyncio.sleep(0.05)
                if not data:
                    return
                sink.write(data)
                await sink.drain()
