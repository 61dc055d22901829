"""Sessions against a real SQLite file: tickets, balance, expiry, restart."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from meshnet.core import FinishCause, RouteSource
from meshnet.errors import NoRoute, UnknownModel
from meshnet.tracker.database import Database, SessionRow, sqlite_url
from meshnet.tracker.messages import Departure, Heartbeat, ShardAdvertisement, ShardLoad
from meshnet.tracker.registry import Registry
from meshnet.tracker.sessions import Sessions
from meshnet.tracker.settings import TrackerSettings
from tests.support.identities import register
from tests.support.shards import WORKER_KEY, advertise, make_shard

ME = "a" * 32
SETTINGS = TrackerSettings(session_ttl_s=60, keep_closed_sessions_s=600)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Mesh:
    """A registry with one node, and sessions on it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = Clock()
        self.registry = Registry(database, SETTINGS)
        self.sessions = Sessions(database, self.registry, SETTINGS, clock=self.clock)
        self.epoch = 0

    async def offer(self, *advertised: ShardAdvertisement) -> None:
        if not self.epoch:
            self.epoch = (await register(self.registry, ME, "n1")).lease_epoch
        await self.registry.heartbeat("n1", Heartbeat(lease_epoch=self.epoch, instance=ME, shards=advertised))

    async def rows(self) -> list[SessionRow]:
        async with self.database.reading() as session:
            return list(await session.scalars(select(SessionRow).order_by(SessionRow.session_id)))


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    database = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    yield Mesh(database)
    await database.close()


def halves(slots: int = 4) -> tuple[ShardAdvertisement, ShardAdvertisement]:
    return advertise(make_shard("n1/a", "0:3", slots=slots)), advertise(make_shard("n1/b", "3:8", slots=slots))


def test_sessions_are_a_route_source(mesh: Mesh) -> None:
    source: RouteSource = mesh.sessions
    assert source is mesh.sessions


async def test_every_hop_gets_a_ticket_signed_with_its_key(mesh: Mesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    assert session.epoch == 1
    assert [shard.shard_id for shard in session.route.shards] == ["n1/a", "n1/b"]
    for shard, ticket in zip(session.route.shards, session.tickets, strict=True):
        assert (ticket.session_id, ticket.epoch) == (session.session_id, 1)
        assert ticket.expires_unix_s == 1_000_060
        signed = f"meshnet-ticket-v1\n{session.session_id}\n1\n{shard.shard_id}\n1000060"
        assert ticket.mac == hmac.new(bytes.fromhex(WORKER_KEY), signed.encode(), hashlib.sha256).hexdigest()
    (row,) = await mesh.rows()
    assert (row.session_id, row.shard_ids, row.closed_unix_s) == (session.session_id, ["n1/a", "n1/b"], None)


async def test_session_ids_are_random(mesh: Mesh) -> None:
    await mesh.offer(*halves(slots=50))
    ids = {(await mesh.sessions.open_session("tiny")).session_id for _ in range(20)}
    assert len(ids) == 20


async def test_closing_frees_the_slots_once(mesh: Mesh) -> None:
    await mesh.offer(*halves())
    first = await mesh.sessions.open_session("tiny")
    await mesh.sessions.open_session("tiny")
    assert mesh.sessions.open_on("n1/a") == 2
    for cause, tokens in ((FinishCause.EOG, 7), (FinishCause.FAILED, 9)):
        await mesh.sessions.close_session(first.session_id, finish_cause=cause, generated_tokens=tokens)
    await mesh.sessions.close_session("0" * 32, finish_cause=FinishCause.EOG, generated_tokens=0)
    assert mesh.sessions.open_on("n1/a") == 1
    closed = {row.session_id: row for row in await mesh.rows()}[first.session_id]
    assert (closed.finish_cause, closed.generated_tokens, closed.closed_unix_s) == ("eog", 7, 1_000_000)
    assert await mesh.sessions.count_closed() == 1


async def test_unknown_and_unserved_models_are_different_errors(mesh: Mesh) -> None:
    with pytest.raises(UnknownModel, match="no node has offered any model yet"):
        await mesh.sessions.open_session("tiny")
    await mesh.offer(*halves())
    with pytest.raises(UnknownModel, match="model 'huge' is not known; known models: tiny"):
        await mesh.sessions.open_session("huge")
    await mesh.offer(halves()[0])
    with pytest.raises(NoRoute, match="gap at layer 3: no ready shard holds layers 3:8"):
        await mesh.sessions.open_session("tiny")
    await mesh.registry.deregister("n1", Departure(lease_epoch=mesh.epoch, instance=ME))
    with pytest.raises(NoRoute, match="no ready shard holds any of its layers"):
        await mesh.sessions.open_session("tiny")


async def test_the_worker_alone_decides_that_it_is_full(mesh: Mesh) -> None:
    # A gateway that was killed leaves its sessions open here; the worker has freed their slots long ago.
    await mesh.offer(*halves(slots=2))
    for _ in range(5):
        await mesh.sessions.open_session("tiny")
    assert mesh.sessions.open_on("n1/a") == 5


async def test_sessions_opened_at_once_spread_over_replicas(mesh: Mesh) -> None:
    replicas = [advertise(make_shard(f"n1/b{n}", "3:8", slots=8)) for n in range(4)]
    await mesh.offer(advertise(make_shard("n1/a", "0:3", slots=50)), *replicas)
    opened = await asyncio.gather(*(mesh.sessions.open_session("tiny") for _ in range(16)))
    used = Counter(session.route.shards[1].shard_id for session in opened)
    assert used == {"n1/b0": 4, "n1/b1": 4, "n1/b2": 4, "n1/b3": 4}


async def test_reported_load_moves_new_sessions_away(mesh: Mesh) -> None:
    await mesh.offer(
        advertise(make_shard("n1/a", "0:3")),
        advertise(make_shard("n1/b1", "3:8"), ShardLoad(open_sessions=3)),
        advertise(make_shard("n1/b2", "3:8"), ShardLoad(open_sessions=1)),
    )
    session = await mesh.sessions.open_session("tiny")
    assert session.route.shards[1].shard_id == "n1/b2"


async def test_sessions_that_nobody_closed_do_not_repel_new_ones(mesh: Mesh) -> None:
    first, second = (
        advertise(make_shard("n1/w1", "0:8")),
        advertise(make_shard("n1/w2", "0:8"), ShardLoad(open_sessions=1)),
    )
    await mesh.offer(first, second)
    for _ in range(3):
        await mesh.sessions.open_session("tiny")
    # The workers report: w1 has freed all of its sessions, w2 has its one.
    await mesh.offer(first, second)
    session = await mesh.sessions.open_session("tiny")
    assert [shard.shard_id for shard in session.route.shards] == ["n1/w1"]


async def test_a_draining_shard_gets_no_session(mesh: Mesh) -> None:
    await mesh.offer(advertise(make_shard("n1/w", "0:8"), ShardLoad(draining=True)))
    with pytest.raises(NoRoute):
        await mesh.sessions.open_session("tiny")
    assert await mesh.sessions.models() == []


async def test_avoided_shards_are_left_out(mesh: Mesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("n1/b2", "3:8")))
    session = await mesh.sessions.open_session("tiny", avoid_shards=["n1/b"])
    assert [shard.shard_id for shard in session.route.shards] == ["n1/a", "n1/b2"]


async def test_sessions_nobody_closed_expire(mesh: Mesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    mesh.clock.now += 59
    assert await mesh.sessions.expire() == ()
    mesh.clock.now += 1
    assert await mesh.sessions.expire() == (session.session_id,)
    assert mesh.sessions.open_on("n1/a") == 0
    assert mesh.sessions.n_open == 0
    (row,) = await mesh.rows()
    assert (row.finish_cause, row.closed_unix_s) == ("cancelled", 1_000_060)


async def test_closed_sessions_are_forgotten_in_time(mesh: Mesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    await mesh.sessions.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)
    mesh.clock.now += 599
    await mesh.sessions.expire()
    assert len(await mesh.rows()) == 1
    mesh.clock.now += 1
    await mesh.sessions.expire()
    assert await mesh.rows() == []


async def test_a_restart_keeps_open_sessions(mesh: Mesh) -> None:
    await mesh.offer(*halves())
    session = await mesh.sessions.open_session("tiny")
    again = Mesh(mesh.database)
    await again.registry.restore()
    await again.sessions.restore()
    assert again.sessions.n_open == 1
    assert again.sessions.open_on("n1/b") == 1
    await again.sessions.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)
    assert again.sessions.n_open == 0
    assert (await again.sessions.open_session("tiny")).route == session.route


async def test_served_models_tell_the_capacity_of_their_route(mesh: Mesh) -> None:
    await mesh.offer(*halves(), advertise(make_shard("n1/other", "0:3", model="partial")))
    (served,) = await mesh.sessions.models()
    assert (served.model, served.artifact_digest, served.session_capacity_tokens) == ("tiny", "sha256:aa", 512)
    assert served.created_unix_s > 1_600_000_000
