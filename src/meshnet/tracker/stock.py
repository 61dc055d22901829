"""What nodes hold, as the planner sees it: pure functions over what they report."""

from __future__ import annotations

from collections.abc import Mapping

from meshnet.core import LayerRange
from meshnet.planner.snapshot import Held, NodeFacts
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
    """A node that chose its layers itself: each of its ranges counts, also one that it gets ready, and nothing may be
    given to it.

    To the planner these are nodes that have just vanished: their places are kept, and they take no part otherwise. They
    are called the same when a worker has been started again.
    """
    ranges = [
        (one.shard.artifact_digest, one.shard.model, one.shard.layers)
        for one in node.shards.values()
        if not one.load.draining
    ]
    ranges += [
        (activity.artifact_digest, activity.model, activity.layers)
        for activity in node.activities
        if activity.state != "draining" and not activity.refused
    ]
    found = {}
    for digest, model, layers in ranges:
        if names.get(digest) == model:
            key = f"{node.node_id} {layers} {model}"
            found[key] = NodeFacts(node_id=key, memory_bytes=0, held=(Held(model, layers),), vanished_s=seen_s)
    return found
