"""Which route a probe of a shard takes, and what is missing if there is none: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshnet.core import Route, Shard
from meshnet.errors import NoRoute
from meshnet.planner.coverage import covers, gaps, why_no_route
from meshnet.planner.offers import Offer, RouteRequest
from meshnet.planner.routing import choose_route
from meshnet.planner.shapes import shape_of

#: Prompt and answer of a probe, in tokens.
PROMPT_TOKENS = 4
ANSWER_TOKENS = 4
PROBE_TOKENS = PROMPT_TOKENS + ANSWER_TOKENS

#: Makes any other way cheaper.
SUSPECT_BUSY = 1000.0

Family = tuple[str, tuple[str, str, int]]


def family(shard: Shard) -> Family:
    """Shards of the same family may stand in one route."""
    return shard.model, shape_of(shard).kin


def probe_route(
    target: Shard,
    fresh: Sequence[Shard],
    ready: Mapping[str, float],
    suspects: Collection[str],
    shards: Sequence[Shard],
) -> Route | None:
    """A route through as much as possible of ``target``, over ``shards`` of its family.

    Those in ``fresh`` are taken rather than ready ones, so that one probe proves several; ``suspects`` only if there is
    no other way. ``ready`` says how busy each of the ready ones is (sessions per slot).
    """
    busy = {shard_id: SUSPECT_BUSY for shard_id in suspects}
    busy |= {shard_id: 1 + min(sessions_per_slot, 1.0) for shard_id, sessions_per_slot in ready.items()}
    busy |= {shard.shard_id: 0.0 for shard in (*fresh, target)}
    offers = [Offer(shard, busy=busy[shard.shard_id], free_slots=1) for shard in shards if shard.shard_id in busy]
    request = RouteRequest(prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS, capacity_tokens=PROBE_TOKENS)
    try:
        route = choose_route(target.model, offers, request=request, keep={target.shard_id: target.layers})
    except NoRoute:
        return None
    return route if any(shard.shard_id == target.shard_id for shard in route.shards) else None


def why_no_probe(target: Shard, usable: Sequence[Shard], held_up: Mapping[str, tuple[Shard, str]]) -> str:
    """Why no route leads through ``target``. ``usable`` are the shards of its family that a probe may use, ``held_up``
    the others, each with its reason."""
    missing = gaps(target.n_layer, [shard.layers for shard in usable])
    for gap in missing:
        for shard_id, (shard, reason) in sorted(held_up.items()):
            if shard.layers.start < gap.end and gap.start < shard.layers.end:
                return f"no route: layers {gap} are held by {shard_id}, which is not ready ({reason})"
    if missing:
        return f"no route: layers {', '.join(map(str, missing))} are missing"
    if covers(usable):
        return f"no route: layers {target.layers} do not begin and end where those of other shards can"
    return f"no route: {why_no_route(usable)}"
