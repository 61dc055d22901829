"""Choosing a route: pure functions over a snapshot of the offered shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from meshnet.core import LayerRange, Route, Shard
from meshnet.errors import NoRoute
from meshnet.planner.offers import NO_LINKS, Link, Links, Offer, RouteRequest

__all__ = ["NO_LINKS", "Link", "Links", "Offer", "RouteRequest", "choose_route", "covers", "gaps", "why_no_route"]

#: A request of which nothing is known.
ANY_REQUEST = RouteRequest()

NOTHING_KEPT: Mapping[str, LayerRange] = MappingProxyType({})


#: Shards that may stand in one route: same artifact, same build compatibility, same number of layers.
_Kin = tuple[str, str, int]


def choose_route(
    model: str,
    offers: Iterable[Offer],
    *,
    request: RouteRequest = ANY_REQUEST,
    avoid: Collection[str] = (),
    keep: Mapping[str, LayerRange] = NOTHING_KEPT,
    links: Links = NO_LINKS,
) -> Route:
    """The least loaded route that covers every layer of ``model`` once.

    Compares the busiest hop first, then the sum over the hops, then the number of hops, then the shard ids, so the
    same snapshot always gives the same route. Shards named in ``avoid`` are never used.

    Raises:
        NoRoute: the offered shards do not cover the model; the message says where and why.
    """
    candidates = [offer for offer in offers if offer.shard.model == model]
    usable = [offer for offer in candidates if offer.shard.shard_id not in avoid]
    best = _best(usable)
    if best is not None:
        return Route(shards=best)
    reason = why_no_route([offer.shard for offer in usable])
    avoided = sorted({offer.shard.shard_id for offer in candidates} & set(avoid))
    beside = f" (leaving out {', '.join(avoided)}, which just failed or refused)" if avoided else ""
    raise NoRoute(f"no route for {model}{beside}: {reason}")


def covers(shards: Iterable[Shard]) -> bool:
    """True if some of these shards make a route."""
    return _best([Offer(shard) for shard in shards]) is not None


def gaps(n_layer: int, ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """Layers of ``[0, n_layer)`` that none of ``ranges`` holds, as ranges in order."""
    found: list[LayerRange] = []
    covered_to = 0
    for layers in sorted(ranges, key=lambda layers: layers.start):
        if layers.start > covered_to:
            found.append(LayerRange(start=covered_to, end=layers.start))
        covered_to = max(covered_to, layers.end)
    if covered_to < n_layer:
        found.append(LayerRange(start=covered_to, end=n_layer))
    return tuple(found)


def why_no_route(shards: Sequence[Shard]) -> str:
    """What is missing, told from the route that gets furthest. Meant for shards of one model without a route."""
    if not shards:
        return "no ready shard holds any of its layers; start a node that serves it"
    reached: list[tuple[int, Shard | None, _Kin]] = []
    for kin, members in _by_kin([Offer(shard) for shard in shards]).items():
        last = _furthest(members)
        reached.append((last.shard.layers.end if last else 0, last.shard if last else None, kin))
    layer, last_shard, kin = max(reached, key=lambda found: (found[0], found[2]))
    n_layer = kin[2]
    if layer >= n_layer:
        return "none: a route exists"
    mismatch = last_shard and _mismatch(last_shard, [shard for shard in shards if shard.layers.start == layer])
    if mismatch:
        return mismatch
    holders = [shard for shard in shards if _kin(shard) == kin]
    missing = next((gap for gap in gaps(n_layer, [shard.layers for shard in holders]) if gap.start == layer), None)
    if missing is not None:
        return f"gap at layer {layer}: no ready shard holds layers {missing}"
    inside = min(
        (shard for shard in holders if shard.layers.start < layer < shard.layers.end or shard.layers.start > layer),
        key=lambda shard: (shard.layers.start, shard.shard_id),
        default=None,
    )
    overlap = f"; {inside.shard_id} holds {inside.layers}, but ranges must meet exactly" if inside else ""
    return f"gap at layer {layer}: no ready shard starts there{overlap}"


def _mismatch(last: Shard, next_shards: Sequence[Shard]) -> str | None:
    """Why none of the shards that start where ``last`` stops can follow it; None if none starts there."""
    by_id = sorted(next_shards, key=lambda shard: shard.shard_id)
    same_file = [shard for shard in by_id if shard.artifact_digest == last.artifact_digest]
    same_build = [shard for shard in same_file if shard.compatibility_id == last.compatibility_id]
    layer = last.layers.end
    if same_build:
        ours, theirs = last.boundary_out.digest, same_build[0].boundary_in.digest
        return (
            f"boundary mismatch at layer {layer}: {last.shard_id} gives {_short(ours)}, "
            f"{same_build[0].shard_id} takes {_short(theirs)}"
        )
    if same_file:
        ours, theirs = last.compatibility_id, same_file[0].compatibility_id
        return (
            f"different builds at layer {layer}: {last.shard_id} is {_short(ours)}, "
            f"{same_file[0].shard_id} is {_short(theirs)}; run the same Meshnet build on both"
        )
    if by_id:
        ours, theirs = last.artifact_digest, by_id[0].artifact_digest
        return (
            f"different model files at layer {layer}: {last.shard_id} serves {_short(ours)}, "
            f"{by_id[0].shard_id} serves {_short(theirs)}; use the same file on both"
        )
    return None


def _kin(shard: Shard) -> _Kin:
    return shard.artifact_digest, shard.compatibility_id, shard.n_layer


def _by_kin(offers: Iterable[Offer]) -> dict[_Kin, list[Offer]]:
    """Groups that may form routes, each in order of first layer, so that one pass relaxes every path."""
    groups: dict[_Kin, list[Offer]] = {}
    for offer in sorted(offers, key=lambda offer: (offer.shard.layers.start, offer.shard.shard_id)):
        groups.setdefault(_kin(offer.shard), []).append(offer)
    return groups


def _best(offers: Iterable[Offer]) -> tuple[Shard, ...] | None:
    found: list[tuple[float, float, int, tuple[str, ...], tuple[Shard, ...]]] = []
    for members in _by_kin(offers).values():
        # Two passes: "least busiest hop" and "least sum" together have no optimal substructure, each alone has.
        bottleneck = _least_bottleneck(members)
        if bottleneck is not None:
            path = _least_sum([offer for offer in members if offer.busy <= bottleneck])
            total = sum(offer.busy for offer in path)
            shards = tuple(offer.shard for offer in path)
            found.append((bottleneck, total, len(path), tuple(shard.shard_id for shard in shards), shards))
    return min(found, key=lambda candidate: candidate[:4])[4] if found else None


#: Where a path stands: the next layer and the digest of the boundary it brings there.
_Place = tuple[int, str]


def _least_bottleneck(members: Sequence[Offer]) -> float | None:
    busiest: dict[_Place, float] = {}
    answer: float | None = None
    for offer in members:
        shard = offer.shard
        before = 0.0 if shard.is_head else busiest.get((shard.layers.start, shard.boundary_in.digest))
        if before is None:
            continue
        here = max(before, offer.busy)
        if shard.is_tail:
            answer = here if answer is None else min(answer, here)
        else:
            place = (shard.layers.end, shard.boundary_out.digest)
            busiest[place] = min(here, busiest.get(place, here))
    return answer


def _least_sum(members: Sequence[Offer]) -> tuple[Offer, ...]:
    Cost = tuple[float, int, tuple[str, ...]]
    best: dict[_Place, tuple[Cost, tuple[Offer, ...]]] = {}
    answers: list[tuple[Cost, tuple[Offer, ...]]] = []
    start: tuple[Cost, tuple[Offer, ...]] = ((0.0, 0, ()), ())
    for offer in members:
        shard = offer.shard
        before = start if shard.is_head else best.get((shard.layers.start, shard.boundary_in.digest))
        if before is None:
            continue
        (total, hops, ids), path = before
        here: tuple[Cost, tuple[Offer, ...]] = (
            (total + offer.busy, hops + 1, (*ids, shard.shard_id)),
            (*path, offer),
        )
        if shard.is_tail:
            answers.append(here)
        else:
            place = (shard.layers.end, shard.boundary_out.digest)
            known = best.get(place)
            if known is None or here[0] < known[0]:
                best[place] = here
    return min(answers, key=lambda answer: answer[0])[1]


def _furthest(members: Sequence[Offer]) -> Offer | None:
    """The last hop of the path that gets furthest from layer 0."""
    reached: set[_Place] = set()
    last: Offer | None = None
    for offer in members:
        shard = offer.shard
        if shard.is_head or (shard.layers.start, shard.boundary_in.digest) in reached:
            reached.add((shard.layers.end, shard.boundary_out.digest))
            if last is None or shard.layers.end > last.shard.layers.end:
                last = offer
    return last


def _short(digest: str) -> str:
    return digest if len(digest) <= 24 else digest[:23] + "…"
