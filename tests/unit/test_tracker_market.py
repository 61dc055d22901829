"""Offers as they follow from reports, readiness and open sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshnet.core import LayerRange
from meshnet.planner.offers import Link, Offer
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.market import FRESH_S, MEASURED_TOKENS, Market
from meshnet.tracker.messages import Heartbeat, LinkMeasure, ShardAdvertisement, ShardLoad
from meshnet.tracker.open_sessions import Hop, OpenSession, OpenSessions
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings
from tests.support import identities
from tests.support.session_mesh import ME, Clock
from tests.support.shards import WORKER_KEY, advertise, make_shard

SETTINGS = TrackerSettings(lease_ttl_s=1000)


class Place:
    """A market over a registry whose nodes report when they are told to."""

    def __init__(self, database: Database, *, probing: bool = False) -> None:
        self.clock = Clock(100.0)
        self.registry = Registry(database, SETTINGS, clock=self.clock, probing=probing)
        self.sessions = OpenSessions()
        self.market = Market(self.registry, self.sessions)
        self._epochs: dict[str, int] = {}

    async def report(self, node_id: str, *shards: ShardAdvertisement, links: tuple[LinkMeasure, ...] = ()) -> None:
        if node_id not in self._epochs:
            self._epochs[node_id] = (await identities.register(self.registry, ME, node_id)).lease_epoch
        beat = Heartbeat(lease_epoch=self._epochs[node_id], instance=ME, shards=shards, links=links)
        await self.registry.heartbeat(node_id, beat)

    def open(self, session_id: str, *shard_ids: str) -> None:
        layers = LayerRange(start=0, end=8)
        hops = tuple(Hop(shard_id, "n1", layers, 512) for shard_id in shard_ids)
        self.sessions.add(OpenSession(session_id, 1, "tiny", "sha256:aa", hops, 10**10, self.clock.now))

    def offers(self, model: str | None = None, artifact_digest: str | None = None) -> dict[str, Offer]:
        return {o.shard.shard_id: o for o in self.market.offers(model, artifact_digest=artifact_digest)}


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    yield opened
    await opened.close()


@pytest.fixture
def place(database: Database) -> Place:
    return Place(database)


def worker(name: str, load: ShardLoad | None = None, **facts: str) -> ShardAdvertisement:
    address = f"127.0.0.1:{7000 + sum(map(ord, name))}"
    return advertise(make_shard(name, "0:8", slots=10, address=address, **facts), load)  # type: ignore[arg-type]


async def test_what_a_worker_reports_is_its_offer(place: Place) -> None:
    load = ShardLoad(
        open_sessions=2,
        queued_frames=3,
        prefill_tokens=100,
        prefill_compute_us=8_000,
        decode_tokens=100,
        decode_compute_us=40_000,
    )
    await place.report("n1", worker("a", load), worker("b"))
    offers = place.offers()
    a, b = offers["a"], offers["b"]
    assert (a.busy, a.free_slots, a.node_id, a.prefill_us, a.decode_us, a.recent) == (0.5, 8, "n1", 10.0, 50.0, 0.0)
    assert (b.busy, b.free_slots, b.prefill_us, b.decode_us) == (0.0, 10, None, None)
    assert (place.market.node_of("a"), place.market.worker_key("a").hex()) == ("n1", WORKER_KEY)


@pytest.mark.parametrize(("tokens", "us"), [(MEASURED_TOKENS - 1, None), (MEASURED_TOKENS, 12.5)])
async def test_a_probe_alone_is_no_measure_of_speed(place: Place, tokens: int, us: float | None) -> None:
    us_spent = 100 * tokens
    load = ShardLoad(
        prefill_tokens=tokens, prefill_compute_us=us_spent, decode_tokens=tokens, decode_compute_us=us_spent
    )
    await place.report("n1", worker("a", load))
    offer = place.offers()["a"]
    assert (offer.prefill_us, offer.decode_us) == (us, us)


async def test_sessions_count_until_the_worker_counts_them(place: Place) -> None:
    await place.report("n1", worker("a"), worker("b"))
    assert place.offers()["a"].free_slots == 10
    place.open("1", "a")
    place.open("2", "a", "b")
    assert {name: offer.free_slots for name, offer in place.offers().items()} == {"a": 8, "b": 9}
    place.sessions.remove("2")
    assert {name: offer.free_slots for name, offer in place.offers().items()} == {"a": 9, "b": 10}
    place.clock.now += 1
    await place.report("n1", worker("a", ShardLoad(open_sessions=1)), worker("b"))
    assert {name: offer.free_slots for name, offer in place.offers().items()} == {"a": 9, "b": 10}


async def test_what_was_given_lately_fades(place: Place) -> None:
    await place.report("n1", worker("a"))
    place.open("1", "a")
    recent = [place.offers()["a"].recent]
    for _ in range(3):
        place.clock.now += FRESH_S
        recent.append(place.offers()["a"].recent)
    assert recent[0] == 1.0
    assert recent == sorted(set(recent), reverse=True)


async def test_who_is_no_offer(place: Place) -> None:
    await place.report(
        "n1",
        worker("good"),
        worker("draining", ShardLoad(draining=True)),
        worker("other", model="large"),
        worker("newer", artifact="sha256:bb"),
    )
    assert set(place.offers()) == {"good", "other", "newer"}
    assert set(place.offers("tiny")) == {"good", "newer"}
    assert set(place.offers("tiny", "sha256:aa")) == {"good"}
    place.clock.now += SETTINGS.lease_ttl_s
    assert place.offers() == {}


async def test_a_shard_is_offered_once_it_is_ready(database: Database) -> None:
    place = Place(database, probing=True)
    await place.report("n1", worker("a"))
    assert place.offers() == {}
    await place.registry.prove(["a"])
    assert set(place.offers()) == {"a"}
    await place.registry.doubt(["a"], "gone mad")
    assert place.offers() == {}


async def test_withdrawn_shards_are_forgotten(place: Place) -> None:
    await place.report("n1", worker("a"), worker("b"))
    place.offers()
    await place.report("n1", worker("b"))
    assert set(place.offers()) == {"b"}
    with pytest.raises(KeyError):
        place.market.node_of("a")
    assert place.market.node_of("b") == "n1"


async def test_links_lead_from_node_to_node(place: Place) -> None:
    measures = (LinkMeasure(shard_id="b", rtt_ms=2.5, bytes_per_s=1e6), LinkMeasure(shard_id="gone", rtt_ms=1.0))
    await place.report("n1", worker("a"), links=measures)
    await place.report("n2", worker("b"))
    assert place.market.links() == {("n1", "n2"): Link(2.5, 1e6)}
    await place.report("n1", worker("a"))
    assert place.market.links() == {}
