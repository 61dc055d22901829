"""Offers as they follow from reports, readiness and open sessions."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from meshnet.core import LayerRange
from meshnet.errors import LeaseLost, TrackerUnavailable
from meshnet.planner.offers import Link, Offer
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.market import FRESH_S, MEASURED_TOKENS, Market
from meshnet.tracker.messages import Departure, Heartbeat, LinkMeasure, ShardAdvertisement, ShardLoad
from meshnet.tracker.open_sessions import FADE_S, FADED, Hop, OpenSession, OpenSessions
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
    assert (a.prefill_seen_us, a.decode_seen_us) == (8_000, 40_000)
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


async def test_sessions_count_although_a_report_was_malformed(place: Place) -> None:
    await place.report("n1", worker("a"))
    place.clock.now += 1
    place.open("1", "a")
    place.clock.now += 1
    await place.registry.renew("n1", 1, ME)
    assert place.offers()["a"].free_slots == 9
    await place.report("n1", worker("a"))
    assert place.offers()["a"].free_slots == 10


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


NODES = ("n1", "n2", "n3")
SHARDS = ("a", "b", "c")
LEASE_S = 6.0

LOADS = (
    ShardLoad(),
    ShardLoad(draining=True),
    ShardLoad(open_sessions=3, queued_frames=2, prefill_tokens=100, prefill_compute_us=800, decode_tokens=100),
)
VARIANTS = {
    (shard_id, model, artifact): make_shard(shard_id, "0:8", slots=4, model=model, artifact=artifact)
    for shard_id, model, artifact in itertools.product(SHARDS, ("tiny", "large"), ("sha256:aa", "sha256:bb"))
}


class Paper:
    """A database of which nobody reads."""

    def __init__(self) -> None:
        self.fails = False

    def transact_now(self, write: Callable[[Connection], None]) -> bool:
        if self.fails:
            raise TrackerUnavailable("the disk is full")
        return True


@dataclass(frozen=True)
class Event:
    """What happens next, and to whom; what is not of that event is not looked at."""

    kind: str
    node: str = "n1"
    session: str = "1"
    shards: tuple[str, ...] = ()
    model: str = "tiny"
    artifact: str = "sha256:aa"
    load: int = 0
    seconds: float = 0.0


EVENTS = st.builds(
    Event,
    # Mostly reports: without them nothing is offered.
    st.sampled_from(
        ("report",) * 8
        + ("step", "open", "reroute") * 3
        + ("register", "leave", "renew", "expire", "prove", "doubt", "await slot", "close", "tidy", "fail", "mend")
    ),
    st.sampled_from(NODES),
    st.sampled_from(("1", "2", "3")),
    st.lists(st.sampled_from(SHARDS), unique=True).map(tuple),
    st.sampled_from(("tiny", "large")),
    st.sampled_from(("sha256:aa", "sha256:bb")),
    st.sampled_from(range(len(LOADS))),
    st.sampled_from((0.0, 0.3, FRESH_S, 2.0, LEASE_S)),
)


class Story:
    """A registry and sessions to which things happen, and what a scan over all of it would offer."""

    def __init__(self, *, probing: bool) -> None:
        self.clock = Clock(100.0)
        self.paper = Paper()
        database = cast(Database, self.paper)
        self.registry = Registry(database, TrackerSettings(lease_ttl_s=LEASE_S), clock=self.clock, probing=probing)
        self.sessions = OpenSessions()
        self.market = Market(self.registry, self.sessions)
        self._epochs: dict[str, int] = {}
        #: The last that each shard's worker told of its load, and when.
        self._heard: dict[str, tuple[ShardAdvertisement, float]] = {}
        #: When which session was given to which shard.
        self._given: list[tuple[float, str, str]] = []
        #: What each node told of its ways, and the links that followed when that was looked at first.
        self._told: dict[str, tuple[object, dict[tuple[str, str], Link]]] = {}

    async def happen(self, event: Event) -> None:
        with suppress(LeaseLost, TrackerUnavailable):
            await self._happen(event)
        self._listen()

    def _listen(self) -> None:
        for node in self.registry.live():
            for shard_id, one in node.shards.items():
                before, _ = self._heard.get(shard_id, (None, 0.0))
                if before is not one:
                    self._heard[shard_id] = one, self.clock.now

    async def _happen(self, event: Event) -> None:
        node, registry = event.node, self.registry
        match event.kind:
            case "report":
                if node not in self._epochs:
                    await self._register(node)
                shards = tuple(
                    advertise(VARIANTS[shard_id, event.model, event.artifact], LOADS[event.load])
                    for shard_id in event.shards
                )
                links = tuple(LinkMeasure(shard_id=shard_id, rtt_ms=1.0 + event.load) for shard_id in SHARDS)
                beat = Heartbeat(
                    lease_epoch=self._epochs[node], instance=ME, shards=shards, links=links if event.load else ()
                )
                await registry.heartbeat(node, beat)
            case "register":
                await self._register(node)
            case "leave":
                await registry.deregister(node, Departure(lease_epoch=self._epochs.get(node, 1), instance=ME))
            case "renew":
                await registry.renew(node, self._epochs.get(node, 1), ME)
            case "expire":
                await registry.expire()
            case "prove":
                await registry.prove(event.shards)
            case "doubt":
                await registry.doubt(event.shards, "gone mad")
            case "await slot":
                registry.await_slot(event.shards, "full")
            case "step":
                self.clock.now += event.seconds
            case "tidy":
                self.sessions.tidy(self.clock.now)
            case "open" if self.sessions.get(event.session) is None:
                now_s = self.clock.now
                self.sessions.add(
                    OpenSession(event.session, 1, "tiny", "sha256:aa", _hops(event.shards), 10**10, now_s)
                )
                self._give(event.session, event.shards)
            case "reroute":
                session = self.sessions.get(event.session)
                if session is not None:
                    new = [shard_id for shard_id in event.shards if not session.uses(shard_id)]
                    session.renewed_s = self.clock.now
                    self.sessions.reroute(session, epoch=2, hops=_hops(event.shards), expires_unix_s=10**10)
                    self._give(event.session, new)
            case "close":
                self.sessions.remove(event.session)
            case "fail" | "mend":
                self.paper.fails = event.kind == "fail"

    async def _register(self, node: str) -> None:
        self._epochs[node] = (await identities.register(self.registry, ME, node)).lease_epoch

    def _give(self, session_id: str, shard_ids: list[str] | tuple[str, ...]) -> None:
        self._given += [(self.clock.now, session_id, shard_id) for shard_id in shard_ids]

    def scan(self, model: str | None, artifact_digest: str | None, *, for_repair: bool) -> dict[str, Offer]:
        """What is offered now, from what every node told last."""
        found = {}
        for node in self.registry.live():
            for shard_id, one in node.shards.items():
                shard, load = one.shard, one.load
                ready = self.registry.may_repair(shard_id) if for_repair else self.registry.is_ready(shard_id)
                if (
                    load.draining
                    or not ready
                    or model not in (None, shard.model)
                    or artifact_digest not in (None, shard.artifact_digest)
                ):
                    continue
                since = {
                    session_id
                    for at_s, session_id, to in self._given
                    if to == shard_id and at_s >= self._heard[shard_id][1] and self._uses(session_id, shard_id)
                }
                taken = load.open_sessions + len(since)
                found[shard_id] = Offer(
                    shard,
                    busy=(taken + load.queued_frames) / shard.session_slots,
                    node_id=node.node_id,
                    free_slots=shard.session_slots - taken,
                    prefill_us=load.prefill_compute_us / 100 / 8 if load.prefill_compute_us else None,
                    recent=sum(
                        math.exp((at_s - self.clock.now) / FADE_S) for at_s, _, to in self._given if to == shard_id
                    ),
                )
        return found

    def _uses(self, session_id: str, shard_id: str) -> bool:
        session = self.sessions.get(session_id)
        return session is not None and session.uses(shard_id)

    def check(self) -> None:
        for model, artifact_digest, for_repair in itertools.product(
            (None, "tiny", "large", "unheard of"), (None, "sha256:aa"), (False, True)
        ):
            offers = self.market.offers(model, artifact_digest=artifact_digest, for_repair=for_repair)
            offered = {offer.shard_id: offer for offer in offers}
            assert len(offered) == len(offers)
            wanted = self.scan(model, artifact_digest, for_repair=for_repair)
            assert {key: _told(offer) for key, offer in offered.items()} == {
                key: _told(offer) for key, offer in wanted.items()
            }
            for shard_id, offer in offered.items():
                # It fades, and is looked at now and then only; and what has faded is forgotten.
                least, most = wanted[shard_id].recent, wanted[shard_id].recent * math.exp(FRESH_S / FADE_S)
                assert least - 2 * FADED <= offer.recent <= most + 1e-9
                assert self.market.node_of(shard_id) == offer.node_id
        self._check_links()
        self._check_memory()

    def _check_links(self) -> None:
        wanted: dict[tuple[str, str], Link] = {}
        for node in self.registry.live():
            told, links = self._told.get(node.node_id, (None, {}))
            if told is not node.links:
                owners = ((measured, self.registry.owner(measured.shard_id)) for measured in node.links)
                links = {(node.node_id, to): Link(measured.rtt_ms) for measured, to in owners if to is not None}
                self._told[node.node_id] = node.links, links
            wanted |= links
        assert dict(self.market.links()) == wanted
        assert {pair: self.market.links().get(pair) for pair in wanted} == wanted
        assert len(self.market.links()) == len(wanted)

    def _check_memory(self) -> None:
        there = {shard_id for node_id in NODES for shard_id in getattr(self.registry.node(node_id), "shards", ())}
        market = self.market
        assert set(market._known) == there
        assert {shard_id for offers in market._offers.values() for shard_id in offers} <= there
        assert all(market._offers.values())
        assert set(market._fading) <= there
        assert all(self.registry.node(node_id).links for node_id in market._links._read)  # type: ignore[union-attr]
        assert not self.registry._changing


def _hops(shard_ids: tuple[str, ...]) -> tuple[Hop, ...]:
    return tuple(Hop(shard_id, "n1", LayerRange(start=0, end=8), 512) for shard_id in shard_ids)


def _told(offer: Offer) -> tuple[object, ...]:
    return offer.shard, offer.node_id, offer.busy, offer.free_slots, offer.prefill_us, offer.decode_us


@settings(max_examples=150, deadline=None)
@given(probing=st.booleans(), events=st.lists(EVENTS, max_size=30))
@example(  # a shard of a node that has fallen silent, and then is another's
    probing=False,
    events=[
        Event("report", "n1", shards=("a", "b"), load=2),
        Event("open", shards=("a",)),
        Event("step", seconds=LEASE_S),
        Event("report", "n2", shards=("a",)),
        Event("expire"),
        Event("report", "n2", shards=("a",), load=2),
        Event("report", "n1", shards=("b",)),
        Event("register", "n1"),
        Event("report", "n1", shards=("b",), model="large"),
    ],
)
@example(  # the node that came last is the first to fall silent
    probing=False,
    events=[
        Event("report", "n1", shards=("a",)),
        Event("report", "n2", shards=("b",)),
        Event("step", seconds=2.0),
        Event("report", "n1", shards=("a",)),
        Event("step", seconds=2.0),
        Event("step", seconds=2.0),
    ],
)
@example(  # another shard under the same id, while the database fails
    probing=True,
    events=[
        Event("report", "n1", shards=("a", "b")),
        Event("prove", shards=("a", "b")),
        Event("fail"),
        Event("report", "n1", shards=("a", "c"), model="large"),
        Event("report", "n1", shards=("b",)),
        Event("leave", "n1"),
        Event("mend"),
        Event("report", "n1", shards=("a", "b")),
        Event("await slot", shards=("a",)),
    ],
)
async def test_offers_are_those_of_a_scan_whatever_happens(probing: bool, events: list[Event]) -> None:
    story = Story(probing=probing)
    story.check()
    for event in events:
        await story.happen(event)
        story.check()


async def test_nodes_that_never_register_leave_nothing_behind(place: Place) -> None:
    for number in range(100):
        with pytest.raises(LeaseLost):
            await place.registry.heartbeat(f"n{number}", Heartbeat(lease_epoch=1, instance=ME))
    assert not place.registry._changing
