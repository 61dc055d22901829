"""A plan before any download: what limits it, and what one more machine changes."""

from __future__ import annotations

import pytest

from meshnet.core import LayerRange
from meshnet.planner.nodes_file import MeasuredSpeed, NetworkEntry, NodeEntry, NodesFile
from meshnet.planner.plan import Request, make_plan
from tests.support.facts import make_facts

MIB = 1 << 20
FACTS = make_facts([10 * MIB] * 8)
REQUEST = Request(context_tokens=256, sessions=2, prompt_tokens=128)


def node(name: str, memory_mib: int, *, layer_us: float = 100.0) -> NodeEntry:
    speed = MeasuredSpeed(model=FACTS.fingerprint, prefill_us=layer_us / 10, decode_us=layer_us)
    return NodeEntry(name=name, memory_bytes=memory_mib * MIB, measured=(speed,))


def mesh(*nodes: NodeEntry, rtt_ms: float = 0.1) -> NodesFile:
    return NodesFile(nodes=nodes, network=NetworkEntry(rtt_ms=rtt_ms))


def test_a_node_limits() -> None:
    plan = make_plan(FACTS, mesh(node("fast", 50), node("slow", 100, layer_us=900.0)), REQUEST)
    assert plan.fits
    assert plan.speeds is not None
    assert dict(plan.speeds.route) == {"fast": LayerRange(start=4, end=8), "slow": LayerRange(start=0, end=4)} or dict(
        plan.speeds.route
    ) == {"fast": LayerRange(start=0, end=4), "slow": LayerRange(start=4, end=8)}
    assert plan.speeds.limiting.startswith("node slow (layers ")
    # Four layers on each, and half of 0.1 ms there and back.
    assert 1000 / plan.speeds.tokens_per_s == pytest.approx(4 * 0.1 + 4 * 0.9 + 0.1, rel=1e-3)


def test_a_link_limits() -> None:
    plan = make_plan(FACTS, mesh(node("a", 50), node("b", 50), rtt_ms=80.0), REQUEST)
    assert plan.speeds is not None
    assert plan.speeds.limiting.startswith("link ")
    assert "40.0 of 80.8 ms per token" in plan.speeds.limiting


def test_one_more_machine_makes_it_fit() -> None:
    plan = make_plan(FACTS, mesh(node("a", 50), node("small", 13)), REQUEST)
    assert not plan.fits
    assert plan.speeds is None
    assert plan.uncovered == (LayerRange(start=5, end=8),)
    assert plan.missing_bytes == FACTS.memory_bytes(LayerRange(start=5, end=8), 256, 2)
    assert [(more.like, more.fits) for more in plan.one_more] == [("a", True), ("small", False)]


def test_one_more_machine_of_a_kind_is_tried_once() -> None:
    plan = make_plan(FACTS, mesh(node("a", 50), node("b", 50), node("c", 60)), REQUEST)
    assert [more.like for more in plan.one_more] == ["a", "c"]


def test_sessions_share_stages() -> None:
    nodes = mesh(node("a", 50), node("b", 50))
    alone = make_plan(FACTS, nodes, Request(context_tokens=256, sessions=1, prompt_tokens=128)).speeds
    many = make_plan(FACTS, nodes, Request(context_tokens=256, sessions=9, prompt_tokens=128)).speeds
    assert alone is not None
    assert many is not None
    assert alone.all_tokens_per_s == pytest.approx(alone.tokens_per_s)
    # Not more than the slower of two equal stages can.
    assert many.all_tokens_per_s == pytest.approx(1000 / 0.4, rel=1e-3)
