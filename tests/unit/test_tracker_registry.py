"""Leases, advertisements and expiry against a real SQLite file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from meshnet.core import Boundary, Cut, Shard
from meshnet.errors import LeaseLost, TrackerUnavailable, UsageError
from meshnet.tracker.database import Database, ShardRow, sqlite_url
from meshnet.tracker.messages import Departure, Heartbeat, LinkMeasure, Neighbour, NodeCapacity, ShardLoad
from meshnet.tracker.neighbours import MAX_NEIGHBOURS, Neighbourhoods
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings
from tests.support import identities
from tests.support.shards import advertise, make_shard

ME = "a" * 32
SOMEONE_ELSE = "b" * 32
SETTINGS = TrackerSettings(heartbeat_s=2, lease_ttl_s=6)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    yield opened
    await opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(database: Database, clock: Clock) -> Registry:
    return Registry(database, SETTINGS, clock=clock)


async def register(registry: Registry, node_id: str = "n1", instance: str = ME) -> int:
    return (await identities.register(registry, instance, node_id)).lease_epoch


def beat(epoch: int, *shards: str, instance: str = ME, load: ShardLoad | None = None) -> Heartbeat:
    return Heartbeat(
        lease_epoch=epoch,
        instance=instance,
        shards=tuple(advertise(make_shard(shard_id, "0:8"), load) for shard_id in shards),
    )


def advertised(registry: Registry) -> list[str]:
    return [a.shard.shard_id for a in registry.advertised()]


async def stored_shards(database: Database) -> int:
    async with database.reading() as session:
        return await session.scalar(select(func.count()).select_from(ShardRow)) or 0


async def test_a_heartbeat_replaces_what_a_node_offers(registry: Registry, database: Database) -> None:
    epoch = await register(registry)
    assert advertised(registry) == []
    await registry.heartbeat("n1", beat(epoch, "a", "b"))
    assert advertised(registry) == ["a", "b"]
    assert await stored_shards(database) == 2
    await registry.heartbeat("n1", beat(epoch, "b"))
    assert advertised(registry) == ["b"]
    assert await stored_shards(database) == 1


async def test_load_is_kept_from_the_last_heartbeat(registry: Registry) -> None:
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a", load=ShardLoad(open_sessions=3)))
    (offer,) = registry.advertised()
    assert offer.load.open_sessions == 3
    await registry.heartbeat("n1", beat(epoch, "a", load=ShardLoad(open_sessions=1)))
    (offer,) = registry.advertised()
    assert offer.load.open_sessions == 1


async def test_a_quick_rejoin_is_the_same_node(registry: Registry) -> None:
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a"))
    again = await register(registry, instance=SOMEONE_ELSE)
    assert again == epoch + 1
    # No ghost: what the earlier process offered is gone, and there is one node.
    assert advertised(registry) == []
    assert [node.node_id for node in registry.nodes()] == ["n1"]


async def test_the_old_lease_is_refused_after_a_rejoin(registry: Registry) -> None:
    epoch = await register(registry)
    await register(registry, instance=SOMEONE_ELSE)
    with pytest.raises(LeaseLost, match="registered again by another process") as caught:
        await registry.heartbeat("n1", beat(epoch, "a"))
    assert caught.value.superseded
    with pytest.raises(LeaseLost) as caught:
        await registry.deregister("n1", Departure(lease_epoch=epoch, instance=ME))
    assert caught.value.superseded
    assert advertised(registry) == []


async def test_an_earlier_epoch_of_the_same_process_may_register_again(registry: Registry) -> None:
    # Its first registration was answered too late, so it asked twice.
    epoch = await register(registry)
    await register(registry)
    with pytest.raises(LeaseLost, match="register again") as caught:
        await registry.heartbeat("n1", beat(epoch))
    assert not caught.value.superseded


async def test_an_unknown_node_is_told_to_register(registry: Registry) -> None:
    with pytest.raises(LeaseLost, match="not registered here") as caught:
        await registry.heartbeat("n1", beat(1))
    assert not caught.value.superseded


async def test_a_silent_node_is_lost_after_its_lease(registry: Registry, clock: Clock, database: Database) -> None:
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a"))
    clock.now += 5.9
    assert await registry.expire() == ()
    assert advertised(registry) == ["a"]
    clock.now += 0.1
    # Routes stop using it at the deadline, not when expiry happens to run.
    assert advertised(registry) == []
    assert [node.state for node in registry.nodes()] == ["lost"]
    assert await registry.expire() == ("n1",)
    assert await registry.expire() == ()
    assert await stored_shards(database) == 0
    with pytest.raises(LeaseLost, match="has ended") as caught:
        await registry.heartbeat("n1", beat(epoch, "a"))
    assert not caught.value.superseded
    assert await register(registry) == epoch + 1


async def test_heartbeats_keep_a_lease(registry: Registry, clock: Clock) -> None:
    epoch = await register(registry)
    for _ in range(5):
        clock.now += 5
        await registry.heartbeat("n1", beat(epoch, "a"))
        assert await registry.expire() == ()
    assert advertised(registry) == ["a"]


async def test_a_node_that_leaves_is_gone_at_once(registry: Registry, database: Database) -> None:
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a"))
    await registry.deregister("n1", Departure(lease_epoch=epoch, instance=ME))
    assert advertised(registry) == []
    assert [node.state for node in registry.nodes()] == ["left"]
    assert await stored_shards(database) == 0
    with pytest.raises(LeaseLost):
        await registry.heartbeat("n1", beat(epoch, "a"))


async def test_a_shard_of_another_node_cannot_be_claimed(registry: Registry) -> None:
    first = await register(registry, "n1")
    await registry.heartbeat("n1", beat(first, "a"))
    second = await register(registry, "n2", SOMEONE_ELSE)
    answer = await registry.heartbeat("n2", beat(second, "a", "b", instance=SOMEONE_ELSE))
    assert answer.not_ready == {"a": "refused: it belongs to node n1"}
    assert [(node.node_id, list(node.shards), list(node.refused)) for node in registry.nodes()] == [
        ("n1", ["a"], []),
        ("n2", ["b"], ["a"]),
    ]


async def beat_with(registry: Registry, shard: Shard, clock: Clock) -> dict[str, str]:
    """What a node is told that offers this shard beside a good one; and the bad one costs it nothing."""
    epoch = await register(registry)
    good = advertise(make_shard("n1/good", "0:8"))
    for _ in range(3):
        clock.now += 4
        answer = await registry.heartbeat(
            "n1", Heartbeat(lease_epoch=epoch, instance=ME, shards=(good, advertise(shard)))
        )
    assert await registry.expire() == ()
    assert advertised(registry) == ["n1/good"]
    (node,) = registry.nodes()
    assert {shard_id: f"refused: {refused.reason}" for shard_id, refused in node.refused.items()} == answer.not_ready
    return answer.not_ready


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shard_id": "n2/bad"}, "begin with n1/"),
        ({"engine": "llama", "artifact_digest": "sha256:aa"}, "artifact digest sha256:aa is not"),
        ({"address": "127.0.0.1:0"}, "has no port"),
        ({"address": "127.0.0.1:65536"}, "has no port"),
        ({"n_layer": 10_001}, "no model has 10001 layers"),
        ({"session_capacity_tokens": 1 << 32}, "session_capacity_tokens 4294967296 is out of range"),
        ({"n_ctx_train": 1 << 32}, "n_ctx_train"),
        ({"max_step_tokens": 1 << 32}, "max_step_tokens"),
        ({"session_slots": 1 << 21}, "session_slots"),
        ({"kv_bytes": 1 << 61}, "kv_bytes"),
        ({"cuts": (Cut(layer=8, boundary=Boundary(digest="x")),)}, "cuts are not layers inside 0:8"),
        ({"cuts": (Cut(layer=4, boundary=Boundary(digest="x")),) * 2}, "cuts are not layers inside 0:8"),
    ],
)
async def test_what_cannot_be_right_is_refused_alone(
    registry: Registry, clock: Clock, change: dict[str, object], told: str
) -> None:
    bad = make_shard("n1/bad", "0:8").model_copy(update=change)
    assert told in (await beat_with(registry, bad, clock))[bad.shard_id]


async def test_an_address_is_one_live_nodes_own(registry: Registry, clock: Clock) -> None:
    taken = make_shard("n2/a", "0:8", address="127.0.0.1:7")
    epoch = await register(registry, "n2", SOMEONE_ELSE)
    claim = Heartbeat(lease_epoch=epoch, instance=SOMEONE_ELSE, shards=(advertise(taken),))
    await registry.heartbeat("n2", claim)
    mine = await register(registry)
    bad = Heartbeat(
        lease_epoch=mine, instance=ME, shards=(advertise(make_shard("n1/a", "0:8", address=taken.address)),)
    )
    told = await registry.heartbeat("n1", bad)
    assert told.not_ready == {"n1/a": "refused: address 127.0.0.1:7 is that of a shard of node n2"}
    clock.now += 5
    await registry.heartbeat("n1", bad)
    clock.now += 2
    # The other node is gone, and its address is free.
    assert (await registry.heartbeat("n1", bad)).not_ready == {}
    assert await registry.expire() == ("n2",)
    assert advertised(registry) == ["n1/a"]


async def test_a_wall_clock_that_jumps_loses_no_node_and_prolongs_no_lease(database: Database, clock: Clock) -> None:
    wall = Clock()
    registry = Registry(database, SETTINGS, clock=clock, wall_clock=wall)
    epoch = await register(registry)
    for jump_s in (7200, -14_400, 86_400, -86_400):
        wall.now += jump_s
        assert await registry.expire() == ()
        assert [node.state for node in registry.nodes()] == ["live"]
        clock.now += 5
        await registry.heartbeat("n1", beat(epoch, "a"))
        assert registry.nodes()[0].last_seen_unix_s == wall.now
    wall.now -= 7200
    clock.now += 6
    assert await registry.expire() == ("n1",)


async def test_a_heartbeat_tells_the_neighbours(registry: Registry) -> None:
    first, second = await register(registry, "n1"), await register(registry, "n2", SOMEONE_ELSE)

    def one(epoch: int, instance: str, shard: Shard) -> Heartbeat:
        return Heartbeat(lease_epoch=epoch, instance=instance, shards=(advertise(shard),))

    head, tail = make_shard("n1/head", "0:4"), make_shard("n2/tail", "4:8")
    assert (await registry.heartbeat("n1", one(first, ME, head))).neighbours == ()
    answer = await registry.heartbeat("n2", one(second, SOMEONE_ELSE, tail))
    assert answer.neighbours == (Neighbour(shard_id="n1/head", address=head.address),)
    answer = await registry.heartbeat("n1", one(first, ME, head))
    assert [neighbour.shard_id for neighbour in answer.neighbours] == ["n2/tail"]


async def test_assignments_are_those_of_the_planner(registry: Registry) -> None:
    epoch = await register(registry)
    assert (await registry.heartbeat("n1", beat(epoch))).assignments is None
    registry.assignments = lambda node_id: () if node_id == "n1" else None
    assert (await registry.heartbeat("n1", beat(epoch))).assignments == ()


async def test_what_a_node_measured_is_kept_while_it_lives(registry: Registry, clock: Clock) -> None:
    epoch = await register(registry)
    told = beat(epoch).model_copy(
        update={
            "capacity": NodeCapacity(memory_bytes=1, disk_bytes=2, threads=3),
            "links": (LinkMeasure(shard_id="n2/a", rtt_ms=1.5),),
        }
    )
    await registry.heartbeat("n1", told)
    (node,) = registry.nodes()
    assert (node.capacity, node.links) == (told.capacity, told.links)
    clock.now += 6
    await registry.expire()
    (node,) = registry.nodes()
    assert (node.capacity, node.links) == (None, ())


async def test_with_probing_only_proven_shards_are_ready(database: Database, clock: Clock) -> None:
    registry = Registry(database, SETTINGS, clock=clock, probing=True)
    epoch = await register(registry)
    answer = await registry.heartbeat("n1", beat(epoch, "a", "b"))
    assert answer.not_ready == {"a": "not probed yet", "b": "not probed yet"}
    assert registry.ready() == ()
    await registry.prove(["a", "withdrawn long ago"])
    await registry.doubt(["b"], "no route")
    assert [one.shard.shard_id for one in registry.ready()] == ["a"]
    assert (await registry.heartbeat("n1", beat(epoch, "a", "b"))).not_ready == {"b": "no route"}

    again = Registry(database, SETTINGS, clock=clock, probing=True)
    await again.restore()
    assert [one.shard.shard_id for one in again.ready()] == ["a"]
    await again.doubt(["a"], "its answer differs")
    once_more = Registry(database, SETTINGS, clock=clock, probing=True)
    await once_more.restore()
    assert once_more.ready() == ()


async def test_a_proof_ends_with_what_it_proved(database: Database, clock: Clock) -> None:
    registry = Registry(database, SETTINGS, clock=clock, probing=True)
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a", "b"))
    await registry.prove(["a", "b"])
    changed = Heartbeat(
        lease_epoch=epoch,
        instance=ME,
        shards=(advertise(make_shard("a", "0:4")), advertise(make_shard("b", "0:8"), ShardLoad(open_sessions=2))),
    )
    assert (await registry.heartbeat("n1", changed)).not_ready == {"a": "not probed yet"}
    await registry.heartbeat("n1", beat(epoch))
    assert (await registry.heartbeat("n1", beat(epoch, "b"))).not_ready == {"b": "not probed yet"}
    await registry.prove(["b"])
    await register(registry, instance=SOMEONE_ELSE)
    assert registry.ready() == ()


async def test_a_restart_keeps_nodes_shards_and_keys(database: Database, clock: Clock) -> None:
    before = Registry(database, SETTINGS, clock=clock)
    epoch = await register(before)
    await before.heartbeat("n1", beat(epoch, "a"))
    gone = await register(before, "n2", SOMEONE_ELSE)
    await before.deregister("n2", Departure(lease_epoch=gone, instance=SOMEONE_ELSE))

    clock.now += 1000  # however long it was down, nobody could report meanwhile
    after = Registry(database, SETTINGS, clock=clock)
    await after.restore()
    assert after.advertised() == before_restart(before)
    assert [(node.node_id, node.state) for node in after.nodes()] == [("n1", "live"), ("n2", "left")]
    assert [model.model for model in after.models()] == ["tiny"]
    await after.heartbeat("n1", beat(epoch, "a"))
    clock.now += 6
    assert await after.expire() == ("n1",)
    assert await register(after, "n2", SOMEONE_ELSE) == gone + 1


def before_restart(registry: Registry) -> object:
    return tuple(shard for node in registry._nodes.values() for shard in node.shards.values())


async def test_a_shard_of_another_version_does_not_stop_a_tracker(database: Database, clock: Clock) -> None:
    before = Registry(database, SETTINGS, clock=clock)
    epoch = await register(before)
    await before.heartbeat("n1", beat(epoch, "a", "b"))
    async with database.writing() as session:
        await session.execute(text("""UPDATE shards SET shard = '{"shard_id": "a"}' WHERE shard_id = 'a'"""))
    after = Registry(database, SETTINGS, clock=clock)
    await after.restore()
    assert advertised(after) == ["b"]
    await after.heartbeat("n1", beat(epoch, "a", "b"))
    assert advertised(after) == ["a", "b"]


async def test_models_stay_known_without_shards(registry: Registry) -> None:
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a"))
    await registry.deregister("n1", Departure(lease_epoch=epoch, instance=ME))
    assert [(model.model, model.n_layer) for model in registry.models()] == [("tiny", 8)]


async def test_concurrent_changes_are_all_kept(registry: Registry, database: Database) -> None:
    async def one(number: int) -> None:
        node_id = f"n{number}"
        epoch = await register(registry, node_id)
        await registry.heartbeat(node_id, beat(epoch, f"s{number}"))

    await asyncio.gather(*(one(number) for number in range(20)))
    assert len(advertised(registry)) == 20
    assert await stored_shards(database) == 20


async def test_the_database_file_is_private_and_set_up(tmp_path: Path, database: Database) -> None:
    assert (tmp_path / "tracker.sqlite3").stat().st_mode & 0o777 == 0o600
    async with database.reading() as session:
        assert await session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert await session.scalar(text("PRAGMA foreign_keys")) == 1


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "cannot use database"),
        ("sqlite+aiosqlite:////proc/none/tracker.sqlite3", "cannot use database"),
        ("nosuchdb+driver://x/y", "cannot use database"),
    ],
)
async def test_a_bad_database_is_a_usage_error(url: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        await Database.open(url)


async def test_a_file_that_is_no_database_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to have a header of one" * 10)
    with pytest.raises(UsageError, match="file is not a database"):
        await Database.open(sqlite_url(path))


async def test_a_failing_database_is_an_unavailable_tracker(registry: Registry, database: Database) -> None:
    epoch = await register(registry)
    async with database.writing() as session:
        await session.execute(text("ALTER TABLE shards RENAME TO elsewhere"))
    with pytest.raises(TrackerUnavailable, match="the tracker's database failed: no such table: shards"):
        await registry.heartbeat("n1", beat(epoch, "a"))
    assert advertised(registry) == []
    async with database.writing() as session:
        await session.execute(text("ALTER TABLE elsewhere RENAME TO shards"))
    await registry.heartbeat("n1", beat(epoch, "a"))
    assert advertised(registry) == ["a"]


async def test_a_failing_database_costs_no_lease_and_keeps_no_dead_shard(
    registry: Registry, database: Database, clock: Clock
) -> None:
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a", "b"))
    async with database.writing() as session:
        await session.execute(text("ALTER TABLE shards RENAME TO elsewhere"))
    # Shard b died, and c came in its place: for longer than a lease nothing of that can be written.
    for _ in range(4):
        clock.now += SETTINGS.lease_ttl_s / 2
        with pytest.raises(TrackerUnavailable):
            await registry.heartbeat("n1", beat(epoch, "a", "c"))
        assert advertised(registry) == ["a"]
    async with database.writing() as session:
        await session.execute(text("ALTER TABLE elsewhere RENAME TO shards"))
    await registry.heartbeat("n1", beat(epoch, "a", "c"))
    assert advertised(registry) == ["a", "c"]
    assert await stored_shards(database) == 2


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(UsageError, match="less than two heartbeats"):
        TrackerSettings(heartbeat_s=2, lease_ttl_s=3)
    with pytest.raises(UsageError, match="sweep_s is 0"):
        TrackerSettings(sweep_s=0)


def test_neighbours_are_few_near_and_of_ones_own_choice() -> None:
    known = Neighbourhoods()
    for number in range(100):
        known.add(f"n{number}", make_shard(f"n{number}/head", "0:4"))
        known.add(f"n{number}", make_shard(f"n{number}/tail", "4:8"))
    known.add("other", make_shard("other/tail", "4:8", build="build-2"))
    head = make_shard("n1/head", "0:4")
    chosen = {}
    for node_id in ("n1", "n2"):
        found = [neighbour.shard_id for neighbour in known.of(node_id, [head])]
        assert len(found) == MAX_NEIGHBOURS
        assert all(shard_id.endswith("/tail") for shard_id in found)
        assert "other/tail" not in found
        assert f"{node_id}/tail" not in found
        chosen[node_id] = found
    assert chosen["n1"] != chosen["n2"]
    # What may be cut can stand beside what it overlaps.
    assert known.of("n1", [make_shard("n1/x", "2:6")]) == ()
    assert len(known.of("n1", [make_shard("n1/x", "2:6", cuts=[3, 4, 5])])) == MAX_NEIGHBOURS
    for number in range(100):
        known.remove(make_shard(f"n{number}/tail", "4:8"))
        known.remove(make_shard(f"n{number}/head", "0:4"))
    assert known.of("n1", [head]) == ()


async def test_a_shard_that_has_not_changed_stays_the_same_object(registry: Registry) -> None:
    epoch = await register(registry)
    await registry.heartbeat("n1", beat(epoch, "a"))
    (before,) = registry.advertised()
    await registry.heartbeat("n1", beat(epoch, "a", load=ShardLoad(open_sessions=1)))
    (after,) = registry.advertised()
    assert after.shard is before.shard
    assert after.load.open_sessions == 1
