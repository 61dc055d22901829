"""A TCP link that fails on command: it stands in front of a worker and cuts, silences, or slows what passes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_CHUNK_BYTES = 1 << 16
#: Chunks on their way in one direction; a sender that is faster waits, as it would for a full socket.
_IN_FLIGHT = 64


@dataclass(frozen=True)
class Pace:
    """How what passes is held up; each direction on its own."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None


class FaultyLink:
    """A proxy from a port of its own to ``target``. Use as an async context manager; ``address`` is known inside.

    ``delay_s`` is how much later everything arrives when all is well. Faults hold until `heal`. All of them act on open
    connections and on new ones.
    """

    def __init__(self, target: str, *, delay_s: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._refusing = False
        self._well = Pace(delay_s)
        self._pace = self._well
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        for connection in list(self._connections):
            await connection.ended.wait()

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._connections)

    def cut(self) -> None:
        """Both ends of every connection see it break, and new ones break at once."""
        self._refusing = True
        for connection in list(self._connections):
            connection.abort()

    def silence(self) -> None:
        """Nothing passes and nothing breaks: a partition. What was sent meanwhile arrives after `heal`."""
        self._flowing.clear()

    def slow(self, *, delay_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """Everything arrives ``delay_s`` later, and no faster than ``bytes_per_s``."""
        self._pace = Pace(delay_s, bytes_per_s)

    def heal(self) -> None:
        """Good as new. Connections that were cut stay cut."""
        self._refusing = False
        self._pace = self._well
        self._flowing.set()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction to its end."""
        loop = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT)

        async def take() -> None:
            while chunk := await reader.read(_CHUNK_BYTES):
                await on_the_way.put((loop.time(), chunk))
            await on_the_way.put((loop.time(), b""))

        async def give() -> None:
            while True:
                taken_s, chunk = await on_the_way.get()
                # Looked at here, not when it was taken: healing sets free what waits.
                while (left_s := taken_s + self._pace.delay_s - loop.time()) > 0:  # noqa: ASYNC110 (a clock)
                    await asyncio.sleep(min(left_s, 0.05))
                await self._flowing.wait()
                if not chunk:
                    writer.write_eof()
                    return
                if self._pace.bytes_per_s:
                    await asyncio.sleep(len(chunk) / self._pace.bytes_per_s)
                writer.write(chunk)
                await writer.drain()

        await _all_or_none(take(), give())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        connection = _Connection(writer)
        self._connections.add(connection)
        try:
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                connection.writers.append(far_writer)
                if not self._refusing:
                    await _all_or_none(self.pass_on(reader, far_writer), self.pass_on(far_reader, writer))
        finally:
            connection.abort()
            self._connections.discard(connection)
            connection.ended.set()


class _Connection:
    """Both sockets of one connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writers = [writer]
        self.ended = asyncio.Event()

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


async def _all_or_none(*works: Coroutine[Any, Any, None]) -> None:
    """Wait for all; the first that fails ends the others, and its error is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
