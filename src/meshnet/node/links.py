"""How far it is from this node to other nodes' workers: measured in the background, told with heartbeats.

The round trip is the time to open a TCP connection, which is nothing that the worker computes. The smallest of a few
counts: delays only ever add. Throughput is what a call with some padding takes longer than one without. That takes
bandwidth from running sessions, so it is done seldom, to one worker at a time, and with much only where a little of it
went through fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import time
from collections.abc import Iterable

from meshnet.errors import MeshnetError, UsageError
from meshnet.node.address import split_address
from meshnet.rpc.client import WorkerPool
from meshnet.tracker.messages import LinkMeasure, Neighbour

#: How often each way is measured again.
EVERY_S = 30.0
#: Connections per measurement, of which the fastest counts.
TRIES = 4
#: An address that takes longer is not measured.
TIMEOUT_S = 2.0
#: Measured at the same time.
AT_ONCE = 4

#: How often the throughput of each way is measured again.
THROUGHPUT_EVERY_S = 600.0
#: What is sent, as long as the step before took less than this.
PADDING_BYTES = (64 << 10, 1 << 20)
FAST_S = 0.02
#: Of the same size, on the same connection: the first ones let its window grow.
SENDINGS = 3
#: A way that takes longer for one of them is not measured.
SENDING_TIMEOUT_S = 5.0
#: Workers that are measured, of those that the tracker names: as many as a heartbeat can tell of.
MAX_LINKS = 256


class Links:
    """The ways to the workers that the tracker named last."""

    def __init__(self, *, every_s: float = EVERY_S, throughput_every_s: float = THROUGHPUT_EVERY_S) -> None:
        self._every_s = every_s
        self._throughput_every_s = throughput_every_s
        self._neighbours: dict[str, str] = {}
        self._measures: dict[str, LinkMeasure] = {}
        self._due_s: dict[str, float] = {}
        self._rates: dict[str, float | None] = {}
        self._rate_due_s: dict[str, float] = {}
        self._named = asyncio.Event()
        #: Set when there is a way whose throughput has to be measured.
        self._reached = asyncio.Event()

    @property
    def measures(self) -> tuple[LinkMeasure, ...]:
        """What is known, by shard id."""
        return tuple(
            measure.model_copy(update={"bytes_per_s": self._rates.get(shard_id)})
            for shard_id, measure in sorted(self._measures.items())
        )

    def name(self, neighbours: Iterable[Neighbour]) -> None:
        """Measure the ways to these, and forget the others. New ones are measured at once."""
        named = {neighbour.shard_id: neighbour.address for neighbour in list(neighbours)[:MAX_LINKS]}
        for shard_id in self._neighbours.keys() - named.keys():
            for kept in (self._measures, self._due_s, self._rates, self._rate_due_s):
                kept.pop(shard_id, None)
        if named.keys() - self._neighbours.keys():
            self._named.set()
        self._neighbours = named

    async def run(self) -> None:
        """Measure until cancelled."""
        async with asyncio.TaskGroup() as measuring:
            measuring.create_task(self._measure_round_trips())
            measuring.create_task(self._measure_throughputs())

    async def _measure_round_trips(self) -> None:
        while True:
            self._named.clear()
            now_s = time.monotonic()
            due = [shard_id for shard_id in self._neighbours if self._due_s.get(shard_id, -math.inf) <= now_s]
            await self._measure(due)
            next_s = min(self._due_s.values(), default=math.inf) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._every_s, max(0.0, next_s))):
                    await self._named.wait()

    async def _measure(self, shard_ids: list[str]) -> None:
        at_once = asyncio.Semaphore(AT_ONCE)

        async def one(shard_id: str) -> None:
            async with at_once:
                rtt_ms = await round_trip_ms(self._neighbours.get(shard_id, ""))
            if shard_id not in self._neighbours:
                return
            # Not all nodes at the same moment.
            self._due_s[shard_id] = time.monotonic() + self._every_s * random.uniform(0.8, 1.2)
            if rtt_ms is None:
                self._measures.pop(shard_id, None)
            else:
                self._measures[shard_id] = LinkMeasure(shard_id=shard_id, rtt_ms=rtt_ms)
                # Never measured, or so long ago that it was due while nobody answered.
                if self._rate_due_s.get(shard_id, -math.inf) <= time.monotonic():
                    self._reached.set()

        await asyncio.gather(*(one(shard_id) for shard_id in shard_ids))

    async def _measure_throughputs(self) -> None:
        while True:
            self._reached.clear()
            now_s = time.monotonic()
            due = [shard_id for shard_id in self._measures if self._rate_due_s.get(shard_id, -math.inf) <= now_s]
            for shard_id in due:
                address = self._neighbours.get(shard_id)
                if address is None:
                    continue
                rate = await bytes_per_s(address)
                if shard_id in self._neighbours:
                    again_s = self._throughput_every_s * random.uniform(0.8, 1.2)
                    self._rates[shard_id], self._rate_due_s[shard_id] = rate, time.monotonic() + again_s
            # Who cannot be reached now is not waited for: it is told when it can.
            reached = [self._rate_due_s.get(shard_id, -math.inf) for shard_id in self._measures]
            next_s = min(reached, default=math.inf) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._throughput_every_s, max(0.0, next_s))):
                    await self._reached.wait()


async def bytes_per_s(address: str) -> float | None:
    """How fast bytes get to the worker at ``HOST:PORT``; None if it does not take them in time."""
    rate: float | None = None
    try:
        # A connection of its own: what it shares with sessions would tell less, and hold them up.
        async with WorkerPool() as pool:
            worker = pool.worker(address)

            async def fastest_s(padding: bytes) -> float:
                took_s = []
                for _ in range(SENDINGS):
                    began_s = time.perf_counter()
                    await worker.status(padding=padding, wait_for_ready=False, timeout_s=SENDING_TIMEOUT_S)
                    took_s.append(time.perf_counter() - began_s)
                return min(took_s)

            empty_s = await fastest_s(b"")
            for size_bytes in PADDING_BYTES:
                # Nothing that a tunnel on the way could compress.
                padded_s = await fastest_s(os.urandom(size_bytes))
                # Either may have been held up by something else: then the difference tells nothing, and may be none.
                took_s = max(padded_s - empty_s, padded_s / 4)
                rate = size_bytes / took_s
                if took_s > FAST_S:
                    break
    except MeshnetError:
        return rate
    return rate


async def round_trip_ms(address: str) -> float | None:
    """The shortest of a few connections to ``HOST:PORT``, in ms; None if nobody answers there in time."""
    try:
        host, port = split_address(address, what="a neighbour's address")
        (family, kind, protocol, _, target), *_ = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )
        best_ms = math.inf
        for _ in range(TRIES):
            with socket.socket(family, kind, protocol) as connection:
                connection.setblocking(False)
                began_s = time.perf_counter()
                async with asyncio.timeout(TIMEOUT_S):
                    await asyncio.get_running_loop().sock_connect(connection, target)
                best_ms = min(best_ms, (time.perf_counter() - began_s) * 1000)
    except (UsageError, OSError, UnicodeError):  # the last one: a name that cannot be one of a host
        return None
    return best_ms
