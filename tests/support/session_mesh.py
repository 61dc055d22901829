"""Sessions of a tracker without its HTTP face: a registry with one node, clocks that are set by hand."""

from __future__ import annotations

from sqlalchemy import select

from meshnet.tracker.database import Database, HopRow, LedgerRow, SessionRow
from meshnet.tracker.messages import Heartbeat, ShardAdvertisement
from meshnet.tracker.registry import Registry
from meshnet.tracker.sessions import Sessions
from meshnet.tracker.settings import TrackerSettings
from tests.support import identities
from tests.support.shards import advertise, make_shard

ME = "a" * 32
SETTINGS = TrackerSettings(session_ttl_s=600, session_lease_s=60, suspect_s=5, keep_closed_sessions_s=6000)


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class SessionMesh:
    """A registry with one node, and sessions on it."""

    def __init__(self, database: Database, *, probing: bool = False) -> None:
        self.database = database
        self.unix = Clock(1_000_000.0)
        self.monotonic = Clock(50.0)
        self.registry = Registry(database, SETTINGS, clock=self.monotonic, probing=probing)
        self.sessions = Sessions(database, self.registry, SETTINGS, clock=self.unix)
        self.epoch = 0
        self.offered: tuple[ShardAdvertisement, ...] = ()

    async def offer(self, *advertised: ShardAdvertisement) -> None:
        if not self.epoch:
            self.epoch = (await identities.register(self.registry, ME, "n1")).lease_epoch
        self.offered = advertised
        await self.registry.heartbeat("n1", Heartbeat(lease_epoch=self.epoch, instance=ME, shards=advertised))

    async def pass_s(self, seconds: float) -> None:
        """Time goes by, and the node reports all the while."""
        until = self.monotonic.now + seconds
        while self.monotonic.now < until:
            step = min(SETTINGS.heartbeat_s, until - self.monotonic.now)
            self.monotonic.now += step
            self.unix.now += step
            await self.offer(*self.offered)

    async def rows(self) -> list[SessionRow]:
        async with self.database.reading() as session:
            return list(await session.scalars(select(SessionRow).order_by(SessionRow.session_id)))

    async def hops(self) -> list[tuple[int, int, str, str, str]]:
        async with self.database.reading() as session:
            rows = await session.scalars(select(HopRow).order_by(HopRow.epoch, HopRow.hop_index))
            return [(r.epoch, r.hop_index, r.shard_id, r.node_id, f"{r.layer_start}:{r.layer_end}") for r in rows]

    async def ledger(self) -> list[LedgerRow]:
        async with self.database.reading() as session:
            order = (LedgerRow.session_id, LedgerRow.epoch, LedgerRow.hop_index)
            return list(await session.scalars(select(LedgerRow).order_by(*order)))

    async def restarted(self) -> SessionMesh:
        """Another tracker on the same database."""
        again = SessionMesh(self.database)
        again.unix.now = self.unix.now
        await again.registry.restore()
        await again.sessions.restore()
        return again


def halves(slots: int = 4) -> tuple[ShardAdvertisement, ShardAdvertisement]:
    return advertise(make_shard("a", "0:3", slots=slots)), advertise(make_shard("b", "3:8", slots=slots))
