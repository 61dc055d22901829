"""Measured ways to other workers: real connections on loopback."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from meshnet.node import links as links_module
from meshnet.node.links import MAX_LINKS, TRIES, Links, bytes_per_s, round_trip_ms
from meshnet.rpc.client import WorkerClient
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


@pytest.mark.parametrize(
    "address", ["", "nonsense", "host:99999", "127.0.0.1:0", "..:1", f"{'a' * 70}.example:80", "[zz]:1", "[:::::]:7"]
)
async def test_an_address_that_is_none_is_no_measure(address: str) -> None:
    assert await round_trip_ms(address) is None
    assert await bytes_per_s(address) is None


async def test_no_room_for_another_connection_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    async with listening() as listener:
        monkeypatch.setattr(socket, "socket", full)
        assert await round_trip_ms(listener.address) is None


@asynccontextmanager
async def mute() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A neighbour that takes connections and never says anything; set once somebody has called it."""
    called, over = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            called.set()
        await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", called
        over.set()


async def test_a_neighbour_that_never_answers_has_no_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "SENDING_TIMEOUT_S", 0.2)
    async with mute() as (address, called):
        assert await bytes_per_s(address) is None
        assert called.is_set()


async def test_the_end_of_a_measurement_leaves_nothing_behind() -> None:
    loop_faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_faults.append(context))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        links = Links()
        async with mute() as (address, called):
            links.name([Neighbour(shard_id="a", address=address)])
            running = asyncio.create_task(links.run())
            await asyncio.wait_for(called.wait(), DEADLINE_S)
            running.cancel()
            (end,) = await asyncio.gather(running, return_exceptions=True)
        del running
        gc.collect()
    assert isinstance(end, asyncio.CancelledError)
    assert [str(one.message) for one in warned if "never" in str(one.message)] == []
    assert loop_faults == []


async def test_a_neighbour_that_cannot_be_reached_any_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, rates, turns = 0, 0, 0
    reachable = True

    class Counted(asyncio.Event):
        def clear(self) -> None:
            nonlocal turns
            turns += 1
            super().clear()

    async def round_trip(address: str) -> float | None:
        nonlocal tries
        tries += 1
        return 1.0 if reachable else None

    async def rate(address: str) -> float | None:
        nonlocal rates
        rates += 1
        return 1e6

    monkeypatch.setattr(links_module, "round_trip_ms", round_trip)
    monkeypatch.setattr(links_module, "bytes_per_s", rate)
    links = Links(every_s=0.01, throughput_every_s=0.01)
    links._reached = Counted()
    links.name([Neighbour(shard_id="a", address="127.0.0.1:1")])
    running = asyncio.create_task(links.run())
    await until(lambda: rates >= 2)
    reachable = False
    await until(lambda: links.measures == ())
    gone = (tries, turns)
    await until(lambda: tries >= gone[0] + 20)
    # Nothing to measure: it does not turn round and round for that.
    assert turns - gone[1] <= 50
    # And back again, long after its throughput was due.
    before = rates
    reachable = True
    await until(lambda: rates > before)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_worker_takes_bytes_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty call that was held up makes a padded one look as if it took nothing."""
    status = WorkerClient.status

    async def held_up(self: WorkerClient, *, padding: bytes = b"", **options: Any) -> Any:
        answer = await status(self, padding=padding, **options)
        if not padding:
            await asyncio.sleep(0.1)
        return answer

    monkeypatch.setattr(WorkerClient, "status", held_up)
    async with ShardServer() as worker:
        rate = await bytes_per_s(worker.address)
    assert rate is not None
    assert rate < 100e9
