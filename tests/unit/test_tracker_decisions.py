"""What is decided when nodes vanish and models compete: who steps in, who gives way, and who is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.core import LayerRange
from meshnet.planner.snapshot import Held, NodeFacts, Placement, Wanted, with_placement
from meshnet.tracker.decisions import decide
from tests.support.facts import make_facts

GB = 10**9
NOW_S, GRACE_S = 1000.0, 60.0
A = Wanted(make_facts([GB] * 8, name="a"), 512, 1)
B = Wanted(make_facts([GB] * 8, name="b"), 512, 1)


def lent(n_nodes: int, *, memory_gb: int = 5) -> list[NodeFacts]:
    """Nodes that hold half a model each, and no more."""
    return [NodeFacts(f"n{number}", memory_gb * GB, 1000 * GB) for number in range(n_nodes)]


def decided(nodes: Sequence[NodeFacts], *wanted: Wanted, urgent: bool = False, busy: Sequence[str] = ()) -> Placement:
    return decide(nodes, [], wanted, now_s=NOW_S, grace_s=GRACE_S, urgent=urgent, busy=busy)


def settled(nodes: Sequence[NodeFacts], *wanted: Wanted) -> list[NodeFacts]:
    """The nodes once they hold what is decided for them."""
    return with_placement(nodes, decided(nodes, *wanted))


def holders(placement: Placement, model: str) -> set[str]:
    return {node_id for node_id, held in placement.ranges.items() if any(one.model == model for one in held)}


def vanished(nodes: Sequence[NodeFacts], node_id: str, *, ago_s: float = 1.0) -> list[NodeFacts]:
    return [replace(node, vanished_s=NOW_S - ago_s) if node.node_id == node_id else node for node in nodes]


def test_helpers_give_way_to_another_model() -> None:
    nodes = settled(lent(4), A)
    assert all(node.held for node in nodes)
    placement = decided(nodes, A, B)
    assert placement.complete
    assert len(holders(placement, "a")) == len(holders(placement, "b")) == 2
    # Planned again on the result, nothing changes.
    assert decided(with_placement(nodes, placement), A, B).ranges == placement.ranges


def test_helpers_with_sessions_are_the_last_to_give_way() -> None:
    nodes = settled(lent(6), A)
    twice = [node.node_id for node in nodes if node.held == nodes[0].held]
    busy = twice[:2]
    placement = decided(nodes, A, B, busy=busy)
    assert placement.complete
    assert set(busy) <= holders(placement, "a")


def test_nobody_gives_way_to_what_would_not_be_complete() -> None:
    nodes = settled(lent(3), A)
    before = {node.node_id: node.held for node in nodes}
    placement = decided(nodes, A, B)
    assert {node_id: placement.ranges.get(node_id) for node_id in before} == before
    assert placement.uncovered["b"] == tuple(range(8))


def test_the_last_one_that_is_there_does_not_give_way() -> None:
    nodes = settled(lent(4), A)
    for node in nodes:
        # Its place is kept, but nobody knows whether it will be back.
        left = vanished(nodes, node.node_id)
        placement = decide(left, [], (A, B), now_s=NOW_S, grace_s=GRACE_S)
        others = [placement.ranges[other.node_id] for other in nodes if other is not node]
        assert {held for ranges in others for held in ranges} >= {held for other in nodes for held in other.held}


def test_replicas_that_are_wanted_do_not_give_way() -> None:
    twice = replace(A, replicas=2)
    nodes = settled(lent(4), twice)
    placement = decided(nodes, twice, B)
    assert len(holders(placement, "a")) == 4
    assert not placement.complete


def test_a_replica_takes_the_place_of_who_vanished() -> None:
    nodes = settled(lent(3), A)
    lone = next(node for node in nodes if [other.held for other in nodes].count(node.held) == 1)
    placement = decided(vanished(nodes, lone.node_id), A)
    assert placement.complete
    assert lone.held in [placement.ranges[node.node_id] for node in nodes if node is not lone]
    assert lone.node_id not in placement.ranges


def test_nobody_moves_if_layers_would_be_given_up_for_it() -> None:
    nodes = [replace(node, memory_bytes=20 * GB) for node in settled(lent(2), A)]
    gone = vanished(nodes, "n1")
    assert decided(gone, A).moved == frozenset()
    assert decided(gone, A).ranges["n0"] == nodes[0].held
    whole = (Held("a", LayerRange(start=0, end=8)),)
    assert decided(gone, A, urgent=True).ranges["n0"] == whole
    assert decided(vanished(nodes, "n1", ago_s=GRACE_S), A).ranges["n0"] == whole


@pytest.mark.parametrize("busy", ["n0", "n1", "n2"])
def test_a_busy_replica_moves_only_if_no_other_can(busy: str) -> None:
    nodes = settled(lent(3), A)
    lone = next(node for node in nodes if [other.held for other in nodes].count(node.held) == 1)
    both = {node.node_id for node in nodes if node is not lone}
    placement = decided(vanished(nodes, lone.node_id), A, busy=[busy])
    assert placement.complete
    assert busy not in placement.moved
    assert decided(vanished(nodes, lone.node_id), A, busy=sorted(both)).complete


BIG = Wanted(make_facts([GB] * 100, name="big"), 512, 1)


@pytest.mark.parametrize("n_nodes", [2, 4])
def test_what_cannot_be_complete_takes_no_room_from_what_can(n_nodes: int) -> None:
    nodes = lent(n_nodes)
    placement = decided(nodes, BIG, A)
    assert placement.uncovered["a"] == ()
    assert placement.uncovered["big"]
    assert decided(with_placement(nodes, placement), BIG, A).ranges == placement.ranges


def test_what_is_begun_and_not_complete_gives_way() -> None:
    nodes = settled(lent(2), BIG)
    assert all(node.held for node in nodes)
    placement = decided(nodes, BIG, A)
    assert placement.uncovered["a"] == ()
    assert decided(with_placement(nodes, placement), BIG, A).ranges == placement.ranges


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Wanted], list[NodeFacts]]:
    """Up to three small models, and up to five nodes that hold anything or nothing of them."""
    wanted = [
        Wanted(make_facts([GB] * draw(st.integers(1, 6)), name=name), 10, 1, draw(st.integers(1, 2)))
        for name in "abc"[: draw(st.integers(1, 3))]
    ]
    nodes = []
    for number in range(draw(st.integers(0, 5))):
        held = []
        for want in wanted:
            if draw(st.integers(0, 2)) == 0:
                start = draw(st.integers(0, want.facts.n_layer - 1))
                end = draw(st.integers(start + 1, want.facts.n_layer))
                held.append(Held(want.model, LayerRange(start=start, end=end)))
        memory_bytes = draw(st.integers(1, 9)) * GB + GB // 2
        nodes.append(NodeFacts(f"n{number}", memory_bytes, None, tuple(held)))
    return wanted, nodes


@settings(deadline=None)
@given(meshes())
def test_plans_come_to_rest_and_never_cover_less(mesh: tuple[list[Wanted], list[NodeFacts]]) -> None:
    wanted, nodes = mesh
    before = decided(nodes, *wanted)
    for _ in range(8):
        nodes = with_placement(nodes, before)
        after = decided(nodes, *wanted)
        complete = {model for model, layers in before.uncovered.items() if not layers}
        assert all(not after.uncovered[model] for model in complete)
        if {node: set(held) for node, held in after.ranges.items()} == {
            node: set(held) for node, held in before.ranges.items()
        }:
            return
        before = after
    raise AssertionError("eight plans, and still others")
