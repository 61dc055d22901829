"""The table of peers: who is told of whom, and for how long."""

from __future__ import annotations

import ipaddress
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.tracker.peers import Endpoint, Peers, SwarmCount

SWARM, OTHER_SWARM = b"s" * 20, b"o" * 20
TTL_S = 150.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(clock: Clock) -> Peers:
    return Peers(TTL_S, clock=clock, chance=random.Random(1), max_endpoints=100)


def at(number: int, port: int = 6881) -> Endpoint:
    return Endpoint(ipaddress.ip_address(f"192.0.2.{number}"), port)


def name(number: int) -> bytes:
    return b"%020d" % number


def join(peers: Peers, number: int, *, complete: bool = False, wanted: int = 50, swarm: bytes = SWARM) -> set[Endpoint]:
    return set(peers.join(swarm, name(number), [at(number)], complete=complete, n_wanted=wanted))


def test_peers_are_told_of_all_others_and_never_of_themselves(peers: Peers) -> None:
    assert join(peers, 1) == set()
    assert join(peers, 2) == {at(1)}
    assert join(peers, 1) == {at(2)}
    assert join(peers, 3) == {at(1), at(2)}
    assert peers.count(SWARM) == SwarmCount(peers=3)


def test_swarms_know_nothing_of_each_other(peers: Peers) -> None:
    join(peers, 1)
    assert join(peers, 2, swarm=OTHER_SWARM) == set()
    assert (peers.count(SWARM).peers, peers.count(OTHER_SWARM).peers, peers.n_swarms) == (1, 1, 2)
    assert peers.count(b"x" * 20) == SwarmCount()


def test_complete_peers_are_not_told_of_each_other(peers: Peers) -> None:
    join(peers, 1, complete=True)
    assert join(peers, 2, complete=True) == set()
    assert join(peers, 3) == {at(1), at(2)}
    assert join(peers, 1, complete=True) == {at(3)}
    assert peers.count(SWARM) == SwarmCount(peers=3, complete=2)


def test_a_peer_with_several_addresses_is_one_peer(peers: Peers) -> None:
    six = Endpoint(ipaddress.ip_address("2001:db8::1"), 6881)
    assert peers.join(SWARM, name(1), [at(1), six], complete=True, n_wanted=50) == ()
    assert join(peers, 2) == {at(1), six}
    # From another of its addresses, as libtorrent announces from each.
    assert peers.join(SWARM, name(1), [at(7)], complete=True, n_wanted=50) == (at(2),)
    assert peers.count(SWARM) == SwarmCount(peers=2, complete=1)


def test_silent_peers_are_forgotten_and_those_heard_stay(peers: Peers, clock: Clock) -> None:
    join(peers, 1)
    join(peers, 2)
    clock.now += TTL_S - 1
    join(peers, 1)
    clock.now += 1
    assert peers.count(SWARM).peers == 1
    assert join(peers, 3) == {at(1)}
    clock.now += TTL_S
    assert peers.count(SWARM).peers == 0
    peers.expire()
    assert peers.n_swarms == 0


def test_a_swarm_is_kept_while_anybody_is_there(peers: Peers, clock: Clock) -> None:
    join(peers, 1)
    clock.now += TTL_S - 1
    peers.expire()
    assert peers.n_swarms == 1
    assert join(peers, 2) == {at(1)}


def test_leaving_is_at_once_and_of_that_peer_alone(peers: Peers) -> None:
    join(peers, 1)
    join(peers, 2)
    peers.leave(SWARM, name(1))
    peers.leave(SWARM, name(9))
    peers.leave(OTHER_SWARM, name(2))
    assert peers.count(SWARM).peers == 1
    assert join(peers, 3) == {at(2)}
    assert peers.n_swarms == 1


def test_a_goodbye_that_arrives_late_does_not_take_out_the_successor(peers: Peers) -> None:
    peers.join(SWARM, name(1), [at(1)], complete=False)
    peers.join(SWARM, name(2), [at(1)], complete=False)
    peers.leave(SWARM, name(1))
    assert peers.count(SWARM).peers == 1
    assert join(peers, 3) == {at(1)}


def test_completions_are_counted(peers: Peers) -> None:
    join(peers, 1)
    peers.join(SWARM, name(1), [at(1)], complete=True, just_completed=True)
    join(peers, 1, complete=True)
    assert peers.count(SWARM) == SwarmCount(peers=1, complete=1, completed=1)


def test_loopback_is_told_on_loopback_only(peers: Peers) -> None:
    here, there = (Endpoint(ipaddress.ip_address(address), 7000) for address in ("127.0.0.1", "::1"))
    peers.join(SWARM, name(1), [here], complete=False)
    peers.join(SWARM, name(2), [there], complete=False)
    assert join(peers, 3) == set()
    told = peers.join(SWARM, name(4), [Endpoint(here.address, 7001)], complete=False, n_wanted=9)
    assert set(told) == {here, there, at(3)}


def test_no_more_are_told_than_wanted_and_not_always_the_same(peers: Peers) -> None:
    for number in range(1, 31):
        join(peers, number)
    told = [join(peers, 99, wanted=5) for _ in range(50)]
    assert {len(some) for some in told} == {5}
    assert set().union(*told) == {at(number) for number in range(1, 31)}
    assert join(peers, 99, wanted=0) == join(peers, 99, wanted=-3) == set()


def test_a_full_swarm_lets_the_longest_silent_go(clock: Clock) -> None:
    peers = Peers(TTL_S, clock=clock, max_endpoints=3)
    for number in (1, 2, 3, 1, 4):
        join(peers, number)
    assert peers.count(SWARM).peers == 3
    assert join(peers, 5, wanted=9) == {at(1), at(4)}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "complete", "leave", "wait", "expire"]),
        st.integers(0, 6),
        st.sampled_from([SWARM, OTHER_SWARM]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_it_agrees_with_a_list(steps: list[tuple[str, int, bytes, int]]) -> None:
    clock = Clock()
    peers = Peers(TTL_S, clock=clock)
    seen: dict[tuple[bytes, int], tuple[bool, float]] = {}

    def there(swarm: bytes) -> dict[int, bool]:
        return {
            number: complete
            for (where, number), (complete, at_s) in seen.items()
            if where == swarm and clock.now < at_s + TTL_S
        }

    for what, number, swarm, wanted in steps:
        if what in ("join", "complete"):
            complete = what == "complete"
            others = {
                at(other) for other, whole in there(swarm).items() if other != number and not (complete and whole)
            }
            told = peers.join(swarm, name(number), [at(number)], complete=complete, n_wanted=wanted)
            assert set(told) <= others
            assert len(told) == len(set(told)) == min(wanted, len(others))
            seen[swarm, number] = (complete, clock.now)
        elif what == "leave":
            peers.leave(swarm, name(number))
            seen.pop((swarm, number), None)
        elif what == "wait":
            clock.now += number * 25.0
        else:
            peers.expire()
        for where in (SWARM, OTHER_SWARM):
            count = peers.count(where)
            assert (count.peers, count.complete) == (len(there(where)), sum(there(where).values()))
