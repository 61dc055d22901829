"""Choosing a route: a pure function over a snapshot of the offered shards.

The cost of a route is the time that the request is predicted to take on it, in whole microseconds:

* per hop, its layers times (prompt tokens x prefill cost + answer tokens x decode cost), and what every step takes
  beside them; times one plus the sessions that it already serves. Prefill counts as work, as if chunks did not
  overlap: what overlaps is work all the same. A hop that serves a part of its shard waits for that part of what its
  sessions' steps take beside the layers, and takes all of that for its own: else one more hop would be nearly free.
* per seam, half a round trip for every step and the boundary's bytes; and the ring's way back from tail to head.

Before time come, in this order: room for the session's tokens, layers that a broken route computed already and that
stay where they are, and free session slots.

The search walks the model's layers in order. Shards of the same shape differ by a factor only, so that the cheapest
stands for all; where links are measured, a few of them do. Inside a shard that may be cut, the cheapest entry so far
is all that matters at an exit. So the work grows with the number of distinct shapes and their cuts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from types import MappingProxyType
from typing import NamedTuple

from meshnet.core import LayerRange, Route, Shard
from meshnet.errors import NoRoute
from meshnet.planner.coverage import HeldUp, covers, gaps, why_no_route
from meshnet.planner.offers import NO_LINKS, Link, Links, Offer, RouteRequest
from meshnet.planner.predict import CHUNK_TOKENS
from meshnet.planner.shapes import Shape

__all__ = ["NO_LINKS", "Link", "Links", "Offer", "RouteRequest", "choose_route", "covers", "gaps", "why_no_route"]

#: A request of which nothing is known.
ANY_REQUEST = RouteRequest()

NOTHING_KEPT: Mapping[str, LayerRange] = MappingProxyType({})

#: Costs per layer and token of a mesh where nothing is measured yet, and of a link that is not.
DEFAULT_PREFILL_US = 200.0
DEFAULT_DECODE_US = 1000.0
DEFAULT_LINK = Link(rtt_ms=1.0, bytes_per_s=100e6)

#: Between workers of one node.
LOCAL_LINK = Link(rtt_ms=0.1, bytes_per_s=1e9)

#: What a shard takes for a step beside its layers: to receive and to send a frame, to wake threads. Without it, shards
#: whose layers take no longer than that would be told apart by nothing but the noise of their measurements.
STEP_US = 200.0

#: Where links are measured, the cheapest few shards of a shape are looked at singly, the ring is tried for a few heads,
#: and a few ways to a place are followed up: as many as these allow, shared out among the shapes.
_LINKED_LANES = 36
_MAX_WIDTH = 6
_MAX_WAYS = 12

#: Searches for a better route than one that uses a shard twice.
_MAX_SEARCHES = 32

#: Far above any time, so that slots come before time, and layers that are kept before slots.
_MAX_RATE_US = 10**9
_FULL = 10**15
_KEPT = 10**21


def choose_route(
    model: str,
    offers: Iterable[Offer],
    *,
    request: RouteRequest = ANY_REQUEST,
    avoid: Collection[str] = (),
    keep: Mapping[str, LayerRange] = NOTHING_KEPT,
    links: Links = NO_LINKS,
    held_up: Callable[[], Sequence[HeldUp]] = tuple,
) -> Route:
    """The route with the lowest predicted time for ``request``; the same for the same snapshot, in whatever order.

    Shards named in ``avoid`` are never used. ``keep`` names the surviving hops of a broken route and the ranges they
    served: of all routes, one is chosen in which as many layers as possible stay there. A full shard is used only if
    there is no way round it, one that holds fewer than ``request.capacity_tokens`` only if no route holds as many.
    ``held_up`` is asked for shards that are not ready only if there is no route.

    Raises:
        NoRoute: the offered shards do not cover the model; the message says where and why.
    """
    candidates = [offer for offer in offers if offer.model == model]
    usable = [offer for offer in candidates if offer.shard_id not in avoid] if avoid else candidates
    found = _with_room(usable, request, keep, links)
    if found is not None:
        return Route(shards=found)
    reason = why_no_route([offer.shard for offer in usable], held_up())
    avoided = sorted({offer.shard_id for offer in candidates} & set(avoid))
    beside = f" (leaving out {', '.join(avoided)}, which just failed or refused)" if avoided else ""
    raise NoRoute(f"no route for {model}{beside}: {reason}")


def _with_room(
    usable: Sequence[Offer], request: RouteRequest, keep: Mapping[str, LayerRange], links: Links
) -> tuple[Shard, ...] | None:
    """Leaves out shards that are too small for the session, as long as a route remains."""
    wanted = request.capacity_tokens
    roomy = [offer for offer in usable if offer.capacity_tokens >= wanted] if wanted else usable
    neutral = _neutral_speeds(usable)
    found = _Search(roomy, request, keep, links, neutral).best()
    if found is not None or len(roomy) == len(usable):
        return found
    # No route holds what is wanted: then the one that holds most.
    for capacity in sorted({offer.capacity_tokens for offer in usable}, reverse=True):
        if capacity < wanted:
            roomy = [offer for offer in usable if offer.capacity_tokens >= capacity]
            found = _Search(roomy, request, keep, links, neutral).best()
            if found is not None:
                return found
    return None


class _Lane(NamedTuple):
    """A shard as the search sees it. It may be entered from layer ``enter_from`` to before ``enter_to`` only."""

    shape: Shape
    offer: Offer
    rate_us: int  # per layer
    extra: int  # once
    node_id: str | None  # None: links do not matter
    enter_from: int
    enter_to: int


class _Exit(NamedTuple):
    """The cheapest way to have left ``lane`` at layer ``end``, and what came before it."""

    cost: int
    lane: _Lane
    start: int
    end: int
    before: _Exit | None


class _Entry(NamedTuple):
    """The cheapest way to be inside a lane: ``cost`` is that of entering at layer 0 for the same cost further on."""

    cost: int
    start: int
    before: _Exit | None


#: Where a shard may be entered, by its id: half-open.
_Entrances = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class _Search:
    """One search over shards that may all be used."""

    offers: Sequence[Offer]
    request: RouteRequest
    keep: Mapping[str, LayerRange]
    links: Links
    #: Prefill and decode speed of a shard that nobody has measured.
    neutral_speeds: tuple[float, float]
    entrances: _Entrances = field(default_factory=dict)
    #: How often a search was divided in two, in all.
    searches: list[int] = field(default_factory=lambda: [0])

    def best(self) -> tuple[Shard, ...] | None:
        found = self._cheapest()
        return None if found is None else _shards(found)

    def _cheapest(self) -> _Exit | None:
        found: _Exit | None = None
        for lanes in self._lanes():
            for head in self._heads(lanes):
                there = self._sweep(lanes, head)
                if there is not None and (found is None or there.cost < found.cost):
                    found = there
        twice = _used_twice(found)
        if twice is None:
            return found
        # One session cannot be at two hops of the same worker. Every route without that enters the shard either
        # before the second of the two places, or not before it.
        shard_id, second = twice
        enter_from, enter_to = self.entrances.get(shard_id, (0, 10**9))
        halves = (
            replace(self, entrances={**self.entrances, shard_id: bounds})
            for bounds in ((enter_from, second), (second, enter_to))
        )
        self.searches[0] += 1
        possible = (there for half in halves if (there := half._cheapest()) is not None)
        # Speeds and ranges are what nodes say they are: they must not keep a tracker busy. Then some route will do.
        return next(possible, None) if self.searches[0] > _MAX_SEARCHES else min(possible, key=_cost, default=None)

    def _lanes(self) -> list[list[_Lane]]:
        """Lanes that may stand in one route together, in an order that does not depend on that of the offers."""
        prompt, answer = self.request.prompt_tokens, self.request.answer_tokens
        prefill_speed, decode_speed = self.neutral_speeds
        steps_us = self._steps_us
        linked = bool(self.links)
        singled_out = self.entrances.keys() | self.keep.keys()
        groups: dict[Shape | tuple[Shape, str], list[tuple[int, int, float, str, Offer]]] = {}
        for offer in self.offers:
            shard_id = offer.shard_id
            work_us = prompt / (offer.prefill_known + offer.prefill_doubt * prefill_speed)
            work_us += answer / (offer.decode_known + offer.decode_doubt * decode_speed)
            # Beside those of its own session, which `_seam_us` has.
            rate_us = round(work_us * offer.slowdown + steps_us / offer.n_layers * (offer.slowdown - 1.0))
            if rate_us > _MAX_RATE_US:
                rate_us = _MAX_RATE_US
            ranked = (_FULL if offer.full else 0, rate_us, offer.recent, shard_id, offer)
            key = (offer.shape, shard_id) if shard_id in singled_out else offer.shape
            known = groups.get(key)
            if known is None:
                groups[key] = [ranked]
            elif linked:
                known.append(ranked)
            elif ranked < known[0]:
                known[0] = ranked
        by_kin: dict[tuple[str, str, int], list[_Lane]] = {}
        width = self._width(len(groups))
        for members in groups.values():
            shape = members[0][-1].shape
            lanes = by_kin.setdefault(shape.kin, [])
            for extra, rate_us, _, shard_id, offer in nsmallest(width, members):
                node_id = offer.node_id if linked else None
                enter_from, enter_to = self.entrances.get(shard_id, (0, 10**9))
                lanes.append(_Lane(shape, offer, rate_us, extra, node_id, enter_from, enter_to))
                kept = self.keep.get(shard_id)
                if kept is not None and (narrow := _narrowed(shape, kept)) is not None:
                    # The session has its slot there.
                    lanes.append(_Lane(narrow, offer, rate_us, -_KEPT * len(kept), node_id, enter_from, enter_to))
        for lanes in by_kin.values():
            lanes.sort(key=lambda lane: (lane.extra, lane.shape.sort_key, lane.offer.shard_id))
        return [by_kin[kin] for kin in sorted(by_kin)]

    def _heads(self, lanes: Sequence[_Lane]) -> Sequence[str | None]:
        """The nodes that a ring is tried to start at; links decide between them, so None alone without any."""
        at_zero = [lane for lane in lanes if lane.shape.start == 0]
        ranked = sorted(at_zero, key=lambda lane: (lane.extra, lane.rate_us, lane.offer.shard_id))
        return list(dict.fromkeys(lane.node_id for lane in ranked))[: self._width(len({lane.shape for lane in lanes}))]

    def _width(self, n_shapes: int) -> int:
        return min(_MAX_WIDTH, max(1, _LINKED_LANES // max(1, n_shapes))) if self.links else 1

    def _sweep(self, lanes: Sequence[_Lane], head: str | None) -> _Exit | None:
        """The cheapest route whose head is on node ``head``, layer by layer."""
        at_layer: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, lane in enumerate(lanes):
            for index, place in enumerate(lane.shape.places):
                at_layer[place[0]].append((number, index))
        inside: list[_Entry | None] = [None] * len(lanes)
        n_layer = lanes[0].shape.kin[2]
        found: _Exit | None = None
        for layer in sorted(at_layer):
            # Nobody enters and leaves at the same layer, so all exits of this layer are known before its entries.
            exits: dict[str, dict[str | None, _Exit]] = {}
            for number, index in at_layer[layer]:
                entry = inside[number]
                if entry is None or index == 0:
                    continue
                lane = lanes[number]
                cost = entry.cost + layer * lane.rate_us
                if layer == n_layer:
                    cost += self._way_back_us(lane.node_id, head)
                    if found is None or cost < found.cost:
                        found = _Exit(cost, lane, entry.start, layer, entry.before)
                    continue
                by_node = exits.setdefault(lane.shape.places[index][1], {})
                known = by_node.get(lane.node_id)
                if known is None or cost < known.cost:
                    by_node[lane.node_id] = _Exit(cost, lane, entry.start, layer, entry.before)
            for digest, by_node in exits.items():
                if len(by_node) > _MAX_WAYS:
                    exits[digest] = dict(nsmallest(_MAX_WAYS, by_node.items(), key=lambda way: way[1].cost))
            for number, index in at_layer[layer]:
                lane = lanes[number]
                if not lane.enter_from <= layer < lane.enter_to or index + 1 == len(lane.shape.places):
                    continue
                if layer == 0:
                    if lane.node_id == head:
                        inside[number] = _Entry(lane.extra, 0, None)
                    continue
                coming = exits.get(lane.shape.places[index][1])
                if coming is None:
                    continue
                cut_bytes = lane.shape.cut_bytes[index]
                cost, before = min(
                    (
                        (left.cost + self._seam_us(node_id, lane.node_id, cut_bytes), left)
                        for node_id, left in coming.items()
                    ),
                    key=lambda arriving: arriving[0],
                )
                cost += lane.extra - layer * lane.rate_us
                entry = inside[number]
                if entry is None or cost < entry.cost:
                    inside[number] = _Entry(cost, layer, before)
        return found

    @cached_property
    def _steps_us(self) -> float:
        """What all steps of the request take at a hop beside its layers. The head's is the same on every route."""
        return STEP_US * (self.request.answer_tokens + -(-self.request.prompt_tokens // CHUNK_TOKENS))

    def _seam_us(self, giver: str | None, taker: str | None, cut_bytes: int) -> int:
        """All steps and bytes of the request over one seam, and what the steps take at the hop behind it. At least 1:
        of equal routes the shorter one is better."""
        link = self._link(giver, taker)
        steps = self.request.answer_tokens + 1
        n_bytes = cut_bytes * (self.request.prompt_tokens + self.request.answer_tokens)
        bytes_per_s = link.bytes_per_s or DEFAULT_LINK.bytes_per_s or 1.0
        return 1 + round(self._steps_us + 500.0 * link.rtt_ms * steps + 1e6 * n_bytes / bytes_per_s)

    def _way_back_us(self, tail: str | None, head: str | None) -> int:
        return round(500.0 * self._link(tail, head).rtt_ms * self.request.answer_tokens)

    def _link(self, giver: str | None, taker: str | None) -> Link:
        if giver is None or taker is None:
            return DEFAULT_LINK
        return LOCAL_LINK if giver == taker else self.links.get((giver, taker), DEFAULT_LINK)


def _cost(found: _Exit) -> int:
    return found.cost


def _neutral_speeds(offers: Iterable[Offer]) -> tuple[float, float]:
    """Prefill and decode speed of a shard that nobody has measured, in layers and tokens per microsecond: the mean of
    those that somebody has. Of speeds and not of costs: who tells of a huge cost does not slow the others down."""
    prefill = [1.0 / offer.prefill_us for offer in offers if offer.prefill_us is not None]
    decode = [1.0 / offer.decode_us for offer in offers if offer.decode_us is not None]
    return (
        sum(prefill) / len(prefill) if prefill else 1.0 / DEFAULT_PREFILL_US,
        sum(decode) / len(decode) if decode else 1.0 / DEFAULT_DECODE_US,
    )


def _narrowed(shape: Shape, layers: LayerRange) -> Shape | None:
    """The shape of a shard that serves ``layers`` as a whole; None if it cannot."""
    index = {place[0]: number for number, place in enumerate(shape.places)}
    first, last = index.get(layers.start), index.get(layers.end)
    if first is None or last is None:
        return None
    return Shape(shape.kin, (shape.places[first], shape.places[last]), (shape.cut_bytes[first], shape.cut_bytes[last]))


def _used_twice(found: _Exit | None) -> tuple[str, int] | None:
    """A shard that the route uses twice, and the layer where the later use begins."""
    seen: dict[str, int] = {}
    hop = found
    while hop is not None:
        shard_id = hop.lane.offer.shard_id
        if shard_id in seen:
            return shard_id, seen[shard_id]
        seen[shard_id] = hop.start
        hop = hop.before
    return None


def _shards(found: _Exit) -> tuple[Shard, ...]:
    shards: list[Shard] = []
    hop: _Exit | None = found
    while hop is not None:
        shards.append(hop.lane.offer.shard.part(LayerRange(start=hop.start, end=hop.end)))
        hop = hop.before
    return tuple(reversed(shards))
