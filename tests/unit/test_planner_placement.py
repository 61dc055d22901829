"""Placement: what holds of every plan, against brute force where that is possible, and the cases it is made for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.core import LayerRange
from meshnet.planner.placement import Held, NodeFacts, Placement, Wanted, place, with_placement
from tests.support.facts import make_facts

MIB = 1 << 20

#: Nodes vanish and come back at these times.
TIMES = st.sampled_from([None, None, None, 90.0, 10.0])
NOW_S, GRACE_S = 100.0, 30.0


@st.composite
def wants(draw: st.DrawFn) -> Wanted:
    n_layer = draw(st.integers(1, 5))
    facts = make_facts(
        [MIB * draw(st.integers(1, 3)) for _ in range(n_layer)],
        cuts=[layer for layer in range(1, n_layer) if draw(st.integers(0, 3))],
        head_bytes=MIB * draw(st.integers(0, 2)),
        tail_bytes=MIB * draw(st.integers(0, 2)),
        kv_bytes_per_token=draw(st.sampled_from([0.0, MIB / 400])),
    )
    return Wanted(facts, context_tokens=50, sessions=draw(st.integers(1, 2)), replicas=draw(st.integers(1, 2)))


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Wanted, list[NodeFacts]]:
    want = draw(wants())
    nodes = []
    for number in range(draw(st.integers(0, 4))):
        held: tuple[Held, ...] = ()
        if draw(st.booleans()):
            start = draw(st.integers(0, want.facts.n_layer - 1))
            end = draw(st.integers(start + 1, want.facts.n_layer))
            held = (Held(want.model, LayerRange(start=start, end=end)),)
        nodes.append(
            NodeFacts(
                node_id=f"n{number}",
                memory_bytes=MIB * draw(st.integers(1, 16)),
                disk_bytes=draw(st.sampled_from([None, 3 * MIB, 100 * MIB])),
                held=held,
                layer_us=((want.model, draw(st.sampled_from([100.0, 1000.0]))),) if draw(st.booleans()) else (),
                vanished_s=draw(TIMES),
            )
        )
    return want, nodes


def planned(nodes: Sequence[NodeFacts], *wanted: Wanted, grace_s: float = GRACE_S) -> Placement:
    return place(nodes, wanted, now_s=NOW_S, grace_s=grace_s)


def fits(node: NodeFacts, want: Wanted, layers: LayerRange) -> bool:
    memory = want.facts.memory_bytes(layers, want.context_tokens, want.sessions)
    return memory <= 0.9 * node.memory_bytes and (
        node.disk_bytes is None or want.facts.weight_bytes(layers) <= node.disk_bytes
    )


def legal_ranges(want: Wanted) -> list[LayerRange]:
    ends = want.facts.ends
    return [LayerRange(start=start, end=end) for start in ends for end in ends if start < end]


def kept_range(node: NodeFacts, want: Wanted) -> LayerRange | None:
    """The range that a node may keep."""
    there = node.vanished_s is None
    for held in node.held:
        if held.layers in legal_ranges(want) and (fits(node, want, held.layers) if there else True):
            return held.layers if there or (node.vanished_s is not None and NOW_S - node.vanished_s < GRACE_S) else None
    return None


def can_cover(want: Wanted, fixed: Sequence[LayerRange], free: Sequence[NodeFacts]) -> bool:
    """Whether the free nodes could cover what the fixed ranges leave open, found by trying everything."""
    choices = [[None, *(layers for layers in legal_ranges(want) if fits(node, want, layers))] for node in free]
    every = set(range(want.facts.n_layer))
    for choice in product(*choices):
        held = [*fixed, *(layers for layers in choice if layers is not None)]
        if every <= {layer for layers in held for layer in range(layers.start, layers.end)}:
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(meshes(), st.randoms())
def test_every_plan(mesh: tuple[Wanted, list[NodeFacts]], order: random.Random) -> None:
    want, nodes = mesh
    plan = planned(nodes, want)
    by_id = {node.node_id: node for node in nodes}
    given_ranges = {node_id: held[0].layers for node_id, held in plan.ranges.items()}

    # Legal cuts and memory; who is away gets nothing new.
    for node_id, layers in given_ranges.items():
        assert layers in legal_ranges(want)
        if by_id[node_id].vanished_s is None:
            assert fits(by_id[node_id], want, layers)
        else:
            assert layers == kept_range(by_id[node_id], want)

    # It tells truly what is covered, and covers it if it can be.
    covered = {layer for layers in given_ranges.values() for layer in range(layers.start, layers.end)}
    assert plan.uncovered[want.model] == tuple(sorted(set(range(want.facts.n_layer)) - covered))
    keeping = {node.node_id: may for node in nodes if (may := kept_range(node, want)) is not None}
    away = [layers for node_id, layers in keeping.items() if by_id[node_id].vanished_s is not None]
    there = [node for node in nodes if node.vanished_s is None]
    assert plan.complete == can_cover(want, away, there)

    # Nobody moves without need.
    idle = [node for node in there if node.node_id not in keeping]
    if can_cover(want, list(keeping.values()), idle) or not plan.complete:
        for node_id, kept in keeping.items():
            assert given_ranges[node_id] == kept
    for node_id in plan.moved & set(keeping):
        others_move = {moved for moved in plan.moved if moved in keeping and moved != node_id}
        fixed = [layers for other, layers in keeping.items() if other not in others_move]
        free = [node for node in there if node.node_id not in keeping or node.node_id in others_move]
        assert not can_cover(want, fixed, free)

    # The result is a rest, and does not depend on the order of the nodes.
    again = planned(with_placement(nodes, plan), want)
    assert again.ranges == plan.ranges
    assert not again.moved
    shuffled = list(nodes)
    order.shuffle(shuffled)
    assert planned(shuffled, want) == plan


@settings(max_examples=200, deadline=None)
@given(meshes(), st.sets(st.integers(0, 3)))
def test_a_flapping_node_changes_nothing(mesh: tuple[Wanted, list[NodeFacts]], flapping: set[int]) -> None:
    want, nodes = mesh
    settled = with_placement(nodes, planned(nodes, want))
    before = planned(settled, want)
    flap = [
        replace(node, vanished_s=NOW_S - 1.0) if index in flapping and node.vanished_s is None else node
        for index, node in enumerate(settled)
    ]
    during = planned(flap, want)
    assert during.ranges == before.ranges
    assert planned(with_placement(settled, during), want).ranges == before.ranges


def node(node_id: str, memory_mib: int, *, holds: str | None = None, layer_us: float | None = None) -> NodeFacts:
    return NodeFacts(
        node_id=node_id,
        memory_bytes=memory_mib * MIB,
        held=(Held("tiny", LayerRange.parse(holds)),) if holds else (),
        layer_us=(("tiny", layer_us),) if layer_us else (),
    )


def ranges(plan: Placement) -> dict[str, str]:
    return {node_id: str(held[0].layers) for node_id, held in plan.ranges.items()}


TEN = Wanted(make_facts([MIB] * 10), context_tokens=1, sessions=1)


def test_one_node_that_can_holds_everything_and_another_one_too() -> None:
    assert ranges(planned([node("a", 12), node("b", 12)], TEN)) == {"a": "0:10", "b": "0:10"}


def test_the_fastest_nodes_hold_most() -> None:
    plan = planned([node("slow", 8, layer_us=900.0), node("fast", 8, layer_us=100.0)], TEN)
    sizes = {node_id: len(held[0].layers) for node_id, held in plan.ranges.items()}
    assert sizes == {"fast": 7, "slow": 3}


def test_a_new_node_fills_the_gap() -> None:
    plan = planned([node("a", 5, holds="0:4"), node("b", 12), node("c", 5, holds="7:10")], TEN)
    assert ranges(plan) == {"a": "0:4", "b": "4:7", "c": "7:10"}
    assert "b holds layers 4:7 of tiny: nobody holds them" in plan.reasons


def test_one_node_spans_two_gaps_if_there_is_no_other() -> None:
    plan = planned([node("a", 5, holds="0:4"), node("b", 12, holds="5:8"), node("c", 12)], TEN)
    assert ranges(plan)["a"] == "0:4"
    assert ranges(plan)["b"] == "5:8"
    assert ranges(plan)["c"] == "4:10"


def test_a_survivor_moves_only_if_layers_lack_otherwise() -> None:
    plan = planned([node("a", 8, holds="2:6"), node("b", 6)], TEN)
    assert plan.complete
    assert plan.moved == {"a"}
    told = next(reason for reason in plan.reasons if reason.startswith("a "))
    assert "it held 2:6, and without a move layers lack" in told


def test_nobody_moves_if_even_that_covers_nothing() -> None:
    plan = planned([node("a", 5, holds="2:6"), node("b", 5)], TEN)
    assert not plan.complete
    assert ranges(plan) == {"a": "2:6", "b": "6:10"}
    assert plan.uncovered == {"tiny": (0, 1)}


def test_replicas_come_before_help_for_the_slowest() -> None:
    want = replace(TEN, replicas=2)
    mesh = [node("a", 6, holds="0:5", layer_us=100.0), node("b", 6, holds="5:10", layer_us=900.0), node("c", 6)]
    plan = planned(mesh, want)
    assert ranges(plan)["c"] == "0:5"
    mesh = [*with_placement(mesh, plan), node("d", 6)]
    plan = planned(mesh, want)
    assert ranges(plan)["d"] == "5:10"
    plan = planned([*with_placement(mesh, plan), node("e", 6)], want)
    assert ranges(plan)["e"] == "5:10"


def test_a_place_is_given_away_when_the_grace_is_over() -> None:
    mesh = [replace(node("a", 6, holds="0:5"), vanished_s=60.0), node("b", 6, holds="5:10"), node("c", 6)]
    assert ranges(planned(mesh, TEN, grace_s=60.0))["c"] == "0:5"  # as help: a's place is kept
    assert ranges(planned(mesh, TEN, grace_s=60.0))["a"] == "0:5"
    assert "a" not in ranges(planned(mesh, TEN, grace_s=30.0))


def test_legal_cuts_are_respected() -> None:
    want = Wanted(make_facts([MIB] * 10, cuts=[3, 6]), context_tokens=1, sessions=1)
    plan = planned([node("a", 5), node("b", 5), node("c", 7)], want)
    assert plan.complete
    assert {end for held in plan.ranges.values() for end in (held[0].layers.start, held[0].layers.end)} <= {0, 3, 6, 10}


def test_cache_of_all_sessions_counts() -> None:
    facts = make_facts([MIB] * 10, kv_bytes_per_token=MIB / 1000)
    assert planned([node("a", 24)], Wanted(facts, context_tokens=1000, sessions=1)).complete
    assert not planned([node("a", 24)], Wanted(facts, context_tokens=1000, sessions=2)).complete


def test_two_models_share_a_node() -> None:
    other = Wanted(make_facts([MIB] * 4, name="other"), context_tokens=1, sessions=1)
    plan = planned([node("a", 17)], TEN, other)
    assert plan.ranges == {"a": (Held("tiny", LayerRange(start=0, end=10)), Held("other", LayerRange(start=0, end=4)))}
    assert not planned([node("a", 12)], TEN, other).complete


@pytest.mark.parametrize("n_nodes", [200])
def test_many_nodes(n_nodes: int) -> None:
    mesh = [node(f"n{number:04}", 3 + number % 4, layer_us=100.0 + number % 7) for number in range(n_nodes)]
    plan = planned(mesh, replace(TEN, replicas=3))
    assert plan.complete
    assert len(plan.ranges) == n_nodes
    assert all(
        second.start <= first.end
        for first, second in pairwise(
            sorted({held[0].layers for held in plan.ranges.values()}, key=lambda layers: layers.start)
        )
    )
