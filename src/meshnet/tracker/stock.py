"""What nodes hold, as the planner sees it: pure functions over what they report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from meshnet.core import LayerRange
from meshnet.planner.placement import place
from meshnet.planner.snapshot import Held, NodeFacts, Placement, Wanted
from meshnet.tracker.nodes import Node

#: Tokens after which the speed of a shard counts as measured.
MEASURED_TOKENS = 16


def reported(node: Node) -> dict[str, LayerRange]:
    """Ranges that a node serves or gets ready, one per artifact digest.

    What drains or was refused is on its way out.
    """
    found: dict[str, LayerRange] = {}
    for activity in node.activities:
        if activity.state != "draining" and not activity.refused:
            found[activity.artifact_digest] = activity.layers
    for advertised in node.shards.values():
        if not advertised.load.draining:
            found[advertised.shard.artifact_digest] = advertised.shard.layers
    return found


def layer_us(node: Node, names: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    """Measured time per layer and decoded token, by model; ``names`` are those of the planner, by digest."""
    found = {}
    for advertised in node.shards.values():
        name, load = names.get(advertised.shard.artifact_digest), advertised.load
        if name is not None and load.decode_tokens >= MEASURED_TOKENS:
            found[name] = load.decode_compute_us / load.decode_tokens / len(advertised.shard.layers)
    return tuple(sorted(found.items()))


def fixed_facts(node: Node, names: Mapping[str, str], seen_s: float) -> dict[str, NodeFacts]:
    """A node that chose its layers itself: each of its ranges counts, and nothing may be given to it.

    To the planner these are nodes that have just vanished: their places are kept, and they take no part otherwise. They
    are called the same when a worker has been started again.
    """
    found = {}
    for advertised in node.shards.values():
        shard = advertised.shard
        if not advertised.load.draining and names.get(shard.artifact_digest) == shard.model:
            key = f"{node.node_id} {shard.layers} {shard.model}"
            held = (Held(shard.model, shard.layers),)
            found[key] = NodeFacts(node_id=key, memory_bytes=0, held=held, vanished_s=seen_s)
    return found


def decide(
    lent: Sequence[NodeFacts],
    fixed: Sequence[NodeFacts],
    wanted: Sequence[Wanted],
    *,
    now_s: float,
    grace_s: float,
    urgent: bool = False,
    gone: Collection[str] = (),
    busy: Collection[str] = (),
) -> Placement:
    """Who should hold what. ``gone``: nodes that will not come back; ``busy``: nodes that have sessions.

    A node that vanished may be back in a moment, so nobody moves to take its place before the grace time is over,
    unless sessions wait for it (``urgent``). Who holds nothing steps in at once, and so does a replica of others: one
    without sessions if there is any, because a range is given up only when its sessions have ended.
    """
    kept = [node for node in lent if node.node_id not in gone]
    present = [node for node in kept if node.vanished_s is None]

    def placed(nodes: Sequence[NodeFacts]) -> Placement:
        return place([*nodes, *fixed], wanted, now_s=now_s, grace_s=grace_s)

    def with_room(nodes: Sequence[NodeFacts]) -> Placement:
        """Helpers give way to a model that would be covered nowhere, if that covers it: as few as doubling finds."""
        found = placed(nodes)
        if not _lacking(found):
            return found
        # Who has just vanished, to the planner, is there; only others may not be.
        there = [node for node in nodes if node.vanished_s is None or node.vanished_s >= now_s]
        helpers = _surplus(there, fixed, wanted, busy)
        n_freed = 1
        while helpers and n_freed < 2 * len(helpers):
            freed = dict(helpers[:n_freed])
            trial = placed([replace(node, held=freed.get(node.node_id, node.held)) for node in nodes])
            if _lacking(trial) < _lacking(found):
                found = trial
                if not _lacking(found):
                    break
            n_freed *= 2
        return found

    def sparing(nodes: Sequence[NodeFacts]) -> Placement:
        free = with_room(nodes)
        if free.moved.isdisjoint(busy):
            return free
        # To the planner, who has just vanished keeps its range and is given no other.
        spared = with_room([replace(node, vanished_s=now_s) if node.node_id in busy else node for node in nodes])
        return spared if n_uncovered(spared) <= n_uncovered(free) else free

    patient = sparing(kept)
    if len(present) == len(kept):
        return patient
    without = sparing(present)
    moved = without.moved - patient.moved
    return without if urgent or _are_spare(moved, [*present, *fixed]) else patient


def _lacking(placement: Placement) -> int:
    """Models of which layers are held by nobody."""
    return sum(bool(layers) for layers in placement.uncovered.values())


def _surplus(
    nodes: Sequence[NodeFacts], fixed: Sequence[NodeFacts], wanted: Sequence[Wanted], busy: Collection[str]
) -> list[tuple[str, tuple[Held, ...]]]:
    """Nodes that hold more than the replicas wanted, and what is left to each without that.

    Those without sessions come first, then the largest. All of them together can be freed.
    """
    replicas = {want.model: want.replicas for want in wanted}
    holders = Counter(
        (held.model, layer)
        for node in (*nodes, *fixed)
        for held in node.held
        for layer in range(held.layers.start, held.layers.end)
    )
    found = []
    here = [node for node in nodes if node.vanished_s is None]
    for node in sorted(here, key=lambda node: (node.node_id in busy, -node.memory_bytes, node.node_id)):
        kept = []
        for held in node.held:
            layers = [(held.model, layer) for layer in range(held.layers.start, held.layers.end)]
            if all(holders[layer] > replicas.get(held.model, 0) for layer in layers):
                holders.subtract(layers)
            else:
                kept.append(held)
        if len(kept) < len(node.held):
            found.append((node.node_id, tuple(kept)))
    return found


def n_uncovered(placement: Placement) -> int:
    """Layers of all models that nobody holds."""
    return sum(len(layers) for layers in placement.uncovered.values())


def _are_spare(node_ids: Collection[str], nodes: Sequence[NodeFacts]) -> bool:
    """Whether each layer that these nodes hold is held by another one as well."""
    holders = Counter(
        (held.model, layer)
        for node in nodes
        if node.node_id not in node_ids
        for held in node.held
        for layer in range(held.layers.start, held.layers.end)
    )
    return all(
        holders[held.model, layer]
        for node in nodes
        if node.node_id in node_ids
        for held in node.held
        for layer in range(held.layers.start, held.layers.end)
    )
