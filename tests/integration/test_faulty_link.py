"""The link that fails on command does what the tests of repair take for granted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.support.faulty_link import FaultyLink

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def link_to_echo(*, delay_s: float = 0.0) -> AsyncIterator[FaultyLink]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, FaultyLink(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", delay_s=delay_s) as link:
        async with asyncio.timeout(30):
            yield link


async def connect(link: FaultyLink) -> Ends:
    host, _, port = link.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def echoed(ends: Ends, text: bytes) -> bytes:
    reader, writer = ends
    writer.write(text)
    return await reader.readexactly(len(text))


async def test_what_passes_is_whole_and_an_end_is_passed_on() -> None:
    async with link_to_echo() as link:
        reader, writer = await connect(link)
        data = bytes(range(256)) * 8192
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data
        writer.close()


async def test_a_cut_breaks_what_is_open_and_what_comes_until_it_heals() -> None:
    async with link_to_echo() as link:
        ends = await connect(link)
        assert await echoed(ends, b"before") == b"before"
        link.cut()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await echoed(ends, b"after")
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await echoed(await connect(link), b"refused")
        link.heal()
        healed = await connect(link)
        assert await echoed(healed, b"healed") == b"healed"
        assert link.connections == 1
        healed[1].close()


async def test_silence_holds_back_and_loses_nothing() -> None:
    async with link_to_echo() as link:
        ends = await connect(link)
        assert await echoed(ends, b"before") == b"before"
        link.silence()
        waiting = asyncio.create_task(echoed(ends, b"meanwhile"))
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        link.heal()
        assert await waiting == b"meanwhile"
        ends[1].close()


async def test_a_slow_link_delays_each_way_and_healing_frees_what_waits() -> None:
    async with link_to_echo() as link:
        ends = await connect(link)
        link.slow(delay_s=0.2)
        began_s = time.monotonic()
        assert await echoed(ends, b"slow") == b"slow"
        assert time.monotonic() - began_s >= 0.4
        link.heal()
        link.slow(bytes_per_s=100_000)
        began_s = time.monotonic()
        assert await echoed(ends, bytes(20_000)) == bytes(20_000)
        assert time.monotonic() - began_s >= 0.4  # both ways
        link.slow(delay_s=3600)
        waiting = asyncio.create_task(echoed(ends, b"stuck"))
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
        link.heal()
        assert await waiting == b"stuck"
        ends[1].close()


async def test_a_link_that_is_slow_by_nature_heals_to_that() -> None:
    async with link_to_echo(delay_s=0.1) as link:
        ends = await connect(link)
        for _ in ("new", "healed"):
            began_s = time.monotonic()
            assert await echoed(ends, b"slow") == b"slow"
            assert time.monotonic() - began_s >= 0.2
            link.slow(delay_s=3600)
            link.heal()
        ends[1].close()
