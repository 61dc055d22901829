"""Who is in which swarm now: a table in memory, refilled by announces within an interval after a restart."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address

#: A swarm that is full lets the peer go that has been silent for longest.
MAX_ENDPOINTS_PER_SWARM = 2_000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a peer takes connections."""

    address: IPv4Address | IPv6Address
    port: int


@dataclass(frozen=True, slots=True)
class SwarmCount:
    """Peers of a swarm, those of them that have every byte, and how many became complete while anybody was there."""

    peers: int = 0
    complete: int = 0
    completed: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    peer_id: bytes
    complete: bool
    until_s: float


@dataclass(slots=True)
class _Swarm:
    #: In the order of their last announce, so that the first is the first to expire.
    entries: dict[Endpoint, _Entry] = field(default_factory=dict)
    completed: int = 0


class Peers:
    """The peers of all swarms. Which swarms there may be is for the caller to know.

    A peer is known by the id that it chose; one that listens on several addresses has several endpoints.
    """

    def __init__(
        self,
        ttl_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
        max_endpoints: int = MAX_ENDPOINTS_PER_SWARM,
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._chance = chance or random.Random()
        self._max_endpoints = max_endpoints
        self._swarms: dict[bytes, _Swarm] = {}

    def join(
        self,
        swarm: bytes,
        peer_id: bytes,
        endpoints: Collection[Endpoint],
        *,
        complete: bool,
        just_completed: bool = False,
        n_wanted: int = 0,
    ) -> tuple[Endpoint, ...]:
        """Enter or refresh a peer, and return up to ``n_wanted`` others by chance.

        A complete peer gets no complete ones: they have nothing for each other. An endpoint on loopback is told only
        to peers on loopback: for everybody else it would be their own machine.
        """
        there = self._current(swarm)
        until_s = self._clock() + self._ttl_s
        there.completed += just_completed
        for endpoint in endpoints:
            there.entries.pop(endpoint, None)  # to the end of the order; whoever had it before is gone
            there.entries[endpoint] = _Entry(peer_id, complete, until_s)
        while len(there.entries) > self._max_endpoints:
            del there.entries[next(iter(there.entries))]
        local = any(endpoint.address.is_loopback for endpoint in endpoints)
        others = [
            endpoint
            for endpoint, entry in there.entries.items()
            if entry.peer_id != peer_id
            and not (complete and entry.complete)
            and (local or not endpoint.address.is_loopback)
        ]
        return tuple(self._chance.sample(others, min(max(n_wanted, 0), len(others))))

    def leave(self, swarm: bytes, peer_id: bytes) -> None:
        """Take a peer out. Not an error if it is not there."""
        there = self._swarms.get(swarm)
        if there is not None:
            # By its id: the port may be another peer's by now, whose announce came first.
            there.entries = {at: entry for at, entry in there.entries.items() if entry.peer_id != peer_id}

    def count(self, swarm: bytes) -> SwarmCount:
        there = self._swarms.get(swarm)
        if there is None:
            return SwarmCount()
        now_s = self._clock()
        complete = {entry.peer_id: entry.complete for entry in there.entries.values() if now_s < entry.until_s}
        return SwarmCount(len(complete), sum(complete.values()), there.completed)

    def expire(self) -> None:
        """Forget peers that have been silent for too long, and swarms without any."""
        for swarm in list(self._swarms):
            if not self._current(swarm).entries:
                del self._swarms[swarm]

    @property
    def n_swarms(self) -> int:
        return len(self._swarms)

    def _current(self, swarm: bytes) -> _Swarm:
        there = self._swarms.setdefault(swarm, _Swarm())
        now_s = self._clock()
        while there.entries:
            first = next(iter(there.entries))
            if now_s < there.entries[first].until_s:
                break
            del there.entries[first]
        return there
