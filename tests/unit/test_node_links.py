"""Measured ways to other workers: real connections on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from meshnet.node.links import MAX_LINKS, TRIES, Links, bytes_per_s, round_trip_ms
from meshnet.tracker.messages import Neighbour
from tests.support.faulty_link import FaultyLink
from tests.support.shard_server import ShardServer

DEADLINE_S = 20.0


class Listener:
    """Takes connections, and counts those that say nothing. It is no worker."""

    def __init__(self) -> None:
        self.address = ""
        self.taken = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await reader.read(1):
            self.taken += 1
        writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    listener.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield listener


def deaf_address() -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (the kernel and other tasks go on)
            await asyncio.sleep(0.005)


async def test_a_round_trip_is_the_time_to_connect() -> None:
    async with listening() as listener:
        took_ms = await round_trip_ms(listener.address)
        assert took_ms is not None
        assert 0 < took_ms < 1000
        await until(lambda: listener.taken == TRIES)


async def test_nobody_there_is_no_measure() -> None:
    assert await round_trip_ms(deaf_address()) is None
    assert await round_trip_ms("nonsense") is None


async def test_named_workers_are_measured_and_others_forgotten() -> None:
    links = Links()
    running = asyncio.create_task(links.run())
    async with listening() as one, listening() as other:
        links.name([Neighbour(shard_id="a", address=one.address), Neighbour(shard_id="deaf", address=deaf_address())])
        await until(lambda: [measure.shard_id for measure in links.measures] == ["a"])
        links.name([Neighbour(shard_id="b", address=other.address)])
        assert list(links.measures) == []
        await until(lambda: [measure.shard_id for measure in links.measures] == ["b"])
        taken = (one.taken, other.taken)
        links.name([Neighbour(shard_id="b", address=other.address)])
        assert [measure.shard_id for measure in links.measures] == ["b"]
        assert (one.taken, other.taken) == taken
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_ways_are_measured_again_after_a_while() -> None:
    links = Links(every_s=0.02)
    running = asyncio.create_task(links.run())
    async with listening() as listener:
        links.name([Neighbour(shard_id="a", address=listener.address)])
        await until(lambda: listener.taken >= 3 * TRIES)
    # It is gone: what was measured is not true any more.
    await until(lambda: links.measures == ())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_more_are_measured_than_a_heartbeat_can_tell() -> None:
    links = Links()
    async with listening() as listener:
        links.name([Neighbour(shard_id=f"s{n}", address=listener.address) for n in range(MAX_LINKS + 5)])
        running = asyncio.create_task(links.run())
        await until(lambda: len(links.measures) == MAX_LINKS)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_throughput_is_what_more_bytes_take_longer() -> None:
    async with ShardServer() as worker, FaultyLink(worker.address) as link:
        fast = await bytes_per_s(link.address)
        link.slow(bytes_per_s=1e6)
        slow = await bytes_per_s(link.address)
        # A long way alone makes nothing slower.
        link.slow(delay_s=0.02)
        far = await bytes_per_s(link.address)
    assert fast is not None
    assert slow is not None
    assert far is not None
    assert 0.2e6 < slow < 1.5e6 < fast
    assert far > 3 * slow


async def test_no_worker_has_no_throughput() -> None:
    assert await bytes_per_s(deaf_address()) is None


async def test_a_neighbour_is_told_with_its_throughput() -> None:
    links = Links()
    async with ShardServer() as worker:
        links.name([Neighbour(shard_id="a", address=worker.address)])
        running = asyncio.create_task(links.run())
        await until(lambda: any(measure.bytes_per_s for measure in links.measures))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
