"""How far it is from this node to other nodes' workers: measured in the background, told with heartbeats.

What is measured is the time to open a TCP connection, which is one round trip and nothing that the worker computes.
The smallest of a few counts: delays only ever add. Throughput is not measured, because a probe that could tell it would
take bandwidth from running sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import time
from collections.abc import Iterable

from meshnet.errors import UsageError
from meshnet.node.address import split_address
from meshnet.tracker.messages import LinkMeasure, Neighbour

#: How often each way is measured again.
EVERY_S = 30.0
#: Connections per measurement, of which the fastest counts.
TRIES = 4
#: An address that takes longer is not measured.
TIMEOUT_S = 2.0
#: Measured at the same time.
AT_ONCE = 4
#: Workers that are measured, of those that the tracker names: as many as a heartbeat can tell of.
MAX_LINKS = 256


class Links:
    """The ways to the workers that the tracker named last."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._neighbours: dict[str, str] = {}
        self._measures: dict[str, LinkMeasure] = {}
        self._due_s: dict[str, float] = {}
        self._named = asyncio.Event()

    @property
    def measures(self) -> tuple[LinkMeasure, ...]:
        """What is known, by shard id."""
        return tuple(measure for _, measure in sorted(self._measures.items()))

    def name(self, neighbours: Iterable[Neighbour]) -> None:
        """Measure the ways to these, and forget the others. New ones are measured at once."""
        named = {neighbour.shard_id: neighbour.address for neighbour in list(neighbours)[:MAX_LINKS]}
        for shard_id in self._neighbours.keys() - named.keys():
            self._measures.pop(shard_id, None)
            self._due_s.pop(shard_id, None)
        if named.keys() - self._neighbours.keys():
            self._named.set()
        self._neighbours = named

    async def run(self) -> None:
        """Measure until cancelled."""
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

        await asyncio.gather(*(one(shard_id) for shard_id in shard_ids))


async def round_trip_ms(address: str) -> float | None:
    """The shortest of a few connections to ``HOST:PORT``, in ms; None if nobody answers there in time."""
    try:
        host, port = split_address(address, what="a neighbour's address")
        (family, kind, protocol, _, target), *_ = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )
    except (UsageError, OSError):
        return None
    best_ms = math.inf
    for _ in range(TRIES):
        with socket.socket(family, kind, protocol) as connection:
            connection.setblocking(False)
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await asyncio.get_running_loop().sock_connect(connection, target)
            except (OSError, TimeoutError):
                return None
            best_ms = min(best_ms, (time.perf_counter() - began_s) * 1000)
    return best_ms
