"""Who may register: challenges, signatures, and which machine a node is on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text

from meshnet.errors import IdentityRefused, LeaseLost
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.identity import CHALLENGE_TTL_S, MAX_CHALLENGES, Challenges
from meshnet.tracker.messages import Departure, Heartbeat
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings
from tests.support.identities import MACHINE, OTHER_MACHINE, make_identity, register
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
def clock() -> Clock:
    return Clock()


@pytest.fixture
def challenges(clock: Clock) -> Challenges:
    return Challenges(clock)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    yield opened
    await opened.close()


@pytest.fixture
def registry(database: Database, clock: Clock) -> Registry:
    return Registry(database, SETTINGS, clock=clock)


NODE = make_identity("n1")
COPY = make_identity("n1", machine=OTHER_MACHINE)


def test_a_challenge_is_good_once(challenges: Challenges) -> None:
    registration = NODE.registration(ME, challenges.issue("n1").nonce)
    challenges.check("n1", registration)
    with pytest.raises(LeaseLost, match="does not wait for"):
        challenges.check("n1", registration)


def test_a_challenge_is_not_good_for_long(challenges: Challenges, clock: Clock) -> None:
    registration = NODE.registration(ME, challenges.issue("n1").nonce)
    clock.now += CHALLENGE_TTL_S
    with pytest.raises(LeaseLost) as caught:
        challenges.check("n1", registration)
    assert not caught.value.superseded


def test_a_challenge_is_one_nodes_own(challenges: Challenges) -> None:
    nonce = challenges.issue("n2").nonce
    with pytest.raises(LeaseLost):
        challenges.check("n1", NODE.registration(ME, nonce))


def test_challenges_are_bounded(challenges: Challenges, clock: Clock) -> None:
    first = challenges.issue("n1").nonce
    second = challenges.issue("n1").nonce
    for _ in range(MAX_CHALLENGES - 1):
        challenges.issue("flood")
    assert len(challenges) == MAX_CHALLENGES
    with pytest.raises(LeaseLost):
        challenges.check("n1", NODE.registration(ME, first))
    challenges.check("n1", NODE.registration(ME, second))
    clock.now += CHALLENGE_TTL_S
    challenges.issue("n1")
    assert len(challenges) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"signature": "0" * 128},
        {"instance": SOMEONE_ELSE},
        {"machine": OTHER_MACHINE},
        {"public_key": make_identity("n2").registration(ME, "0" * 64).public_key},
        {"public_key": "f" * 64},
    ],
)
def test_what_was_not_signed_is_refused(challenges: Challenges, change: dict[str, str]) -> None:
    registration = NODE.registration(ME, challenges.issue("n1").nonce)
    with pytest.raises(IdentityRefused, match="not signed by the key"):
        challenges.check("n1", registration.model_copy(update=change))


async def test_an_id_belongs_to_its_first_key(registry: Registry, clock: Clock) -> None:
    lease = await register(registry, ME, NODE)
    with pytest.raises(IdentityRefused, match="another key"):
        await register(registry, SOMEONE_ELSE, make_identity("n1", key="thief"))
    await registry.deregister("n1", Departure(lease_epoch=lease.lease_epoch, instance=ME))
    clock.now += 3600
    with pytest.raises(IdentityRefused, match="another key"):
        await register(registry, SOMEONE_ELSE, make_identity("n1", key="thief"))
    assert (await register(registry, ME, NODE)).lease_epoch == lease.lease_epoch + 1


async def test_keys_and_machines_outlive_a_restart(registry: Registry, database: Database, clock: Clock) -> None:
    await register(registry, ME, NODE)
    again = Registry(database, SETTINGS, clock=clock)
    await again.restore()
    with pytest.raises(IdentityRefused, match="another key"):
        await register(again, SOMEONE_ELSE, make_identity("n1", key="thief"))
    with pytest.raises(IdentityRefused, match="running elsewhere"):
        await register(again, SOMEONE_ELSE, COPY)


async def test_a_copy_does_not_disturb_the_running_node(registry: Registry, clock: Clock) -> None:
    lease = await register(registry, ME, NODE)
    beat = Heartbeat(lease_epoch=lease.lease_epoch, instance=ME, shards=(advertise(make_shard("n1/a", "0:8")),))
    await registry.heartbeat("n1", beat)
    clock.now += 1.5
    with pytest.raises(IdentityRefused, match=r"running elsewhere \(last seen 1\.5 s ago\).*--state-dir"):
        await register(registry, SOMEONE_ELSE, COPY)
    assert [offer.shard.shard_id for offer in registry.advertised()] == ["n1/a"]
    await registry.heartbeat("n1", beat)
    (node,) = registry.nodes()
    assert (node.machine, node.lease_epoch, node.state) == (MACHINE, lease.lease_epoch, "live")


async def test_a_node_may_move_when_its_lease_is_over(registry: Registry, clock: Clock) -> None:
    lease = await register(registry, ME, NODE)
    clock.now += 6
    moved = await register(registry, SOMEONE_ELSE, COPY)
    assert moved.lease_epoch == lease.lease_epoch + 1
    with pytest.raises(LeaseLost) as caught:
        await registry.heartbeat("n1", Heartbeat(lease_epoch=lease.lease_epoch, instance=ME))
    assert caught.value.superseded
    await registry.deregister("n1", Departure(lease_epoch=moved.lease_epoch, instance=SOMEONE_ELSE))
    assert (await register(registry, ME, NODE)).lease_epoch == moved.lease_epoch + 1


async def test_the_newer_process_of_a_machine_wins(registry: Registry) -> None:
    lease = await register(registry, ME, NODE)
    newer = await register(registry, SOMEONE_ELSE, NODE)
    assert newer.lease_epoch == lease.lease_epoch + 1
    with pytest.raises(LeaseLost, match="registered again by another process"):
        await registry.heartbeat("n1", Heartbeat(lease_epoch=lease.lease_epoch, instance=ME))


async def test_a_node_from_before_there_were_keys_is_bound_when_it_registers(
    registry: Registry, database: Database, clock: Clock
) -> None:
    await register(registry, ME, NODE)
    async with database.writing() as session:
        await session.execute(text("UPDATE nodes SET public_key = NULL, machine = NULL"))
    again = Registry(database, SETTINGS, clock=clock)
    await again.restore()
    await register(again, SOMEONE_ELSE, NODE)
    with pytest.raises(IdentityRefused, match="another key"):
        await register(again, ME, make_identity("n1", key="thief"))
