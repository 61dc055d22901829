"""The book of open sessions, without clock and database."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshnet.core import LayerRange
from meshnet.tracker.open_sessions import FADE_S, LONGEST_UNREPORTED_S, Hop, OpenSession, OpenSessions

SHARDS = ("a", "b", "c", "d")


def hops(*shard_ids: str) -> tuple[Hop, ...]:
    return tuple(Hop(shard_id, "n1", LayerRange(start=0, end=8), 512) for shard_id in shard_ids)


def session(session_id: str, *shard_ids: str, at_s: float = 10.0, expires_unix_s: int = 1000) -> OpenSession:
    return OpenSession(session_id, 1, "tiny", "sha256:aa", hops(*shard_ids), expires_unix_s, at_s)


def test_counts_follow_opening_rerouting_and_closing() -> None:
    book = OpenSessions()
    first = session("1", "a", "b")
    book.add(first)
    book.add(session("2", "a", "c"))
    assert (len(book), book.on("a"), book.on("b"), book.on("c"), book.on("d")) == (2, 2, 1, 1, 0)
    book.reroute(first, epoch=2, hops=hops("a", "d"), expires_unix_s=2000)
    assert (book.on("a"), book.on("b"), book.on("d")) == (2, 0, 1)
    assert book.remove("1") is first
    assert book.remove("1") is None
    assert (len(book), book.on("a"), book.on("d")) == (1, 1, 0)


def test_a_shard_that_serves_a_route_twice_counts_once() -> None:
    book = OpenSessions()
    book.add(session("1", "a", "a"))
    assert book.on("a") == 1
    assert book.remove("1") is not None
    assert book.on("a") == 0


def test_what_was_given_since_a_report() -> None:
    book = OpenSessions()
    for name, at_s in (("1", 10.0), ("2", 20.0), ("3", 20.0)):
        book.add(session(name, "a", at_s=at_s))
    assert book.given_since("a", 0.0) == 3
    assert book.given_since("a", 20.0) == 2
    book.remove("3")
    assert book.given_since("a", 20.0) == 1
    assert book.given_since("a", 21.0) == 0
    assert book.given_since("b", 0.0) == 0


def test_a_survivor_of_a_repair_is_no_busier_and_its_replacement_is() -> None:
    book = OpenSessions()
    broken = session("1", "a", "b", at_s=10.0)
    book.add(broken)
    assert book.given_since("a", 15.0) == 0  # reported since
    broken.renewed_s = 20.0
    book.reroute(broken, epoch=2, hops=hops("a", "c"), expires_unix_s=2000)
    assert (book.given_since("a", 15.0), book.given_since("c", 15.0), book.given_since("b", 0.0)) == (0, 1, 0)


def test_restored_sessions_are_held_but_not_new() -> None:
    book = OpenSessions()
    book.add(session("1", "a"), reported=True)
    assert (book.on("a"), book.given_since("a", 0.0), book.given_lately("a", 10.0)) == (1, 0, 0.0)


def test_given_lately_fades() -> None:
    book = OpenSessions()
    book.add(session("1", "a", at_s=10.0))
    book.add(session("2", "a", at_s=10.0))
    assert book.given_lately("a", 10.0) == 2.0
    assert book.given_lately("a", 10.0 + FADE_S) == pytest.approx(2.0 * 0.3679, rel=1e-3)
    assert book.given_lately("b", 10.0) == 0.0


def test_unrenewed_and_expired() -> None:
    book = OpenSessions()
    book.add(session("1", "a", at_s=10.0, expires_unix_s=1000))
    book.add(session("2", "a", at_s=20.0, expires_unix_s=2000))
    assert (book.unrenewed(9.9), book.unrenewed(10.0), book.unrenewed(20.0)) == ([], ["1"], ["1", "2"])
    assert (book.expired(999), book.expired(1000)) == ([], ["1"])


def test_suspicion_ends() -> None:
    book = OpenSessions()
    book.suspect(["a", "b"], 15.0)
    book.suspect(["b"], 18.0)
    assert book.suspects(14.9) == {"a", "b"}
    assert book.suspects(15.0) == {"b"}
    assert book.suspects(18.0) == frozenset()


def test_shards_whose_sessions_changed_are_told_once() -> None:
    book = OpenSessions()
    first = session("1", "a", "b")
    book.add(first)
    assert (book.take_changed(), book.take_changed()) == ({"a", "b"}, set())
    book.reroute(first, epoch=2, hops=hops("a", "c"), expires_unix_s=2000)
    assert book.take_changed() == {"a", "b", "c"}
    book.remove("1")
    assert book.take_changed() == {"a", "c"}


def test_nothing_is_kept_for_ever() -> None:
    book = OpenSessions()
    for number in range(100):
        book.add(session(str(number), f"shard-{number}", at_s=10.0))
        book.suspect([f"shard-{number}"], 15.0)
        book.remove(str(number))
    book.tidy(10.0 + LONGEST_UNREPORTED_S + 1)
    book.take_changed()
    state = {name: len(value) for name, value in vars(book).items()}
    assert state == dict.fromkeys(state, 0)


class BookAgainstList(RuleBasedStateMachine):
    """The book beside a plain list of what was given when."""

    def __init__(self) -> None:
        super().__init__()
        self.book = OpenSessions()
        self.now_s = 10.0
        self.number = 0
        #: By session: its shards, each with the time from which it counts as given.
        self.plain: dict[str, dict[str, float]] = {}
        self.reported_s = dict.fromkeys(SHARDS, 0.0)

    @rule(used=st.lists(st.sampled_from(SHARDS), min_size=1, max_size=3), restored=st.booleans())
    def open(self, used: list[str], restored: bool) -> None:
        self.number += 1
        name = str(self.number)
        self.book.add(session(name, *used, at_s=self.now_s), reported=restored)
        self.plain[name] = dict.fromkeys(used, -1.0 if restored else self.now_s)

    @precondition(lambda self: self.plain)
    @rule(data=st.data(), used=st.lists(st.sampled_from(SHARDS), min_size=1, max_size=3))
    def repair(self, data: st.DataObject, used: list[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.plain)))
        found = self.book.get(name)
        assert found is not None
        found.renewed_s = self.now_s
        self.book.reroute(found, epoch=found.epoch + 1, hops=hops(*used), expires_unix_s=2000)
        before = self.plain[name]
        self.plain[name] = {shard_id: before.get(shard_id, self.now_s) for shard_id in used}

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.plain)))
        assert self.book.remove(name) is not None
        del self.plain[name]

    @rule(shard_id=st.sampled_from(SHARDS))
    def report(self, shard_id: str) -> None:
        self.now_s += 1.0
        self.reported_s[shard_id] = self.now_s
        self.now_s += 1.0

    @rule()
    def tidy(self) -> None:
        self.book.tidy(self.now_s)

    @invariant()
    def says_the_same(self) -> None:
        assert len(self.book) == len(self.plain)
        for shard_id in SHARDS:
            given = [used[shard_id] for used in self.plain.values() if shard_id in used]
            assert self.book.on(shard_id) == len(given)
            since_s = self.reported_s[shard_id]
            assert self.book.given_since(shard_id, since_s) == sum(at_s >= since_s for at_s in given)


TestBookAgainstList = BookAgainstList.TestCase
