"""What people see of the registry: nodes with their shards, and which models they cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshnet.core import Shard
from meshnet.planner.coverage import HeldUp, covers, gaps, why_no_route
from meshnet.tracker.messages import ModelCoverage, NodeStatus, ShardAdvertisement, ShardStatus
from meshnet.tracker.nodes import LIVE, KnownModel, Node
from meshnet.tracker.registry import Registry


def node_status(registry: Registry, node: Node, open_on: Callable[[str], int]) -> NodeStatus:
    """One node. ``open_on`` counts the open sessions of a shard."""
    shards = [
        _shard_status(advertised, registry.why_not_ready(shard_id), open_on(shard_id))
        for shard_id, advertised in node.shards.items()
    ]
    shards += [
        _shard_status(refused.advertised, f"refused: {refused.reason}", 0)
        for shard_id, refused in node.refused.items()
        if shard_id not in node.shards
    ]
    return NodeStatus(
        node_id=node.node_id,
        state=node.state,
        lease_epoch=node.lease_epoch,
        version=node.version,
        last_seen_unix_s=node.last_seen_unix_s,
        shards=tuple(sorted(shards, key=lambda shard: shard.shard_id)),
        capacity=node.capacity,
        activities=node.activities,
        assignments=(registry.assignments(node.node_id) or ()) if node.state == LIVE else (),
        links=node.links,
    )


def coverage(registry: Registry) -> tuple[ModelCoverage, ...]:
    """Every known model: whether ready shards cover it, and if not, why."""
    by_model: dict[tuple[str, str], list[Shard]] = {}
    for advertised in registry.advertised():
        if not advertised.load.draining:
            shard = advertised.shard
            by_model.setdefault((shard.model, shard.artifact_digest), []).append(shard)
    return tuple(
        _model_coverage(registry, known, by_model.get((known.model, known.artifact_digest), ()))
        for known in registry.models()
    )


def _model_coverage(registry: Registry, known: KnownModel, shards: Sequence[Shard]) -> ModelCoverage:
    ready: list[Shard] = []
    held_up: list[HeldUp] = []
    for shard in shards:
        reason = registry.why_not_ready(shard.shard_id)
        if reason is None:
            ready.append(shard)
        else:
            held_up.append(HeldUp(shard, reason))
    routable = covers(ready)
    return ModelCoverage(
        model=known.model,
        artifact_digest=known.artifact_digest,
        n_layer=known.n_layer,
        routable=routable,
        reason=None if routable else why_no_route(ready, held_up),
        gaps=gaps(known.n_layer, [shard.layers for shard in ready]),
    )


def _shard_status(advertised: ShardAdvertisement, why_not_ready: str | None, open_sessions: int) -> ShardStatus:
    shard = advertised.shard
    return ShardStatus(
        shard_id=shard.shard_id,
        address=shard.address,
        model=shard.model,
        artifact_digest=shard.artifact_digest,
        layers=shard.layers,
        n_layer=shard.n_layer,
        engine=shard.engine,
        build_id=shard.build_id,
        session_slots=shard.session_slots,
        session_capacity_tokens=shard.session_capacity_tokens,
        open_sessions=open_sessions,
        load=advertised.load,
        ready=why_not_ready is None,
        why_not_ready=why_not_ready,
        pull_ms=advertised.pull_ms,
        load_ms=advertised.load_ms,
    )
