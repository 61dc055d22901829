"""Which workers a node may come to talk to: it is told to measure the way to them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import chain, islice

from meshnet.core import Shard
from meshnet.tracker.messages import Neighbour

MAX_NEIGHBOURS = 16

#: Artifact and build.
_Kin = tuple[str, str]
#: Layers, number of all layers, and whether the range may be cut.
_Range = tuple[int, int, int, bool]


class Neighbourhoods:
    """All advertised shards by what they hold, so that looking for neighbours does not look at every shard."""

    def __init__(self) -> None:
        self._holders: dict[_Kin, dict[_Range, dict[str, tuple[str, Neighbour]]]] = {}

    def add(self, node_id: str, shard: Shard) -> None:
        neighbour = Neighbour(shard_id=shard.shard_id, address=shard.address)
        self._holders.setdefault(_kin(shard), {}).setdefault(_range(shard), {})[shard.shard_id] = node_id, neighbour

    def remove(self, shard: Shard) -> None:
        """Take out what `add` put in; nothing happens if it is not there."""
        ranges = self._holders.get(_kin(shard), {})
        holders = ranges.get(_range(shard), {})
        holders.pop(shard.shard_id, None)
        if not holders:
            ranges.pop(_range(shard), None)
        if not ranges:
            self._holders.pop(_kin(shard), None)

    def of(self, node_id: str, shards: Iterable[Shard]) -> tuple[Neighbour, ...]:
        """Workers of other nodes that may stand next to one of ``shards`` in a route, at most 16.

        First those that begin where one of them ends, or the other way round (a tail sends its tokens to the head). If
        they are too many, every node gets a choice of its own, so that together they measure many pairs.
        """
        meeting: dict[tuple[_Kin, _Range], None] = {}
        overlapping: dict[tuple[_Kin, _Range], None] = {}
        for shard in shards:
            kin, own = _kin(shard), _range(shard)
            for other in self._holders.get(kin, ()):
                if _meets(own, other):
                    meeting[kin, other] = None
                elif _overlaps(own, other):
                    overlapping[kin, other] = None
        found: dict[str, Neighbour] = {}
        for places in (meeting, overlapping):
            room = MAX_NEIGHBOURS - len(found)
            for kin, place in places:
                # Each range gets its share; what some leave over is given to nobody, for simplicity.
                holders = self._holders[kin][place]
                found |= _choice(node_id, holders, max(1, room // len(places)))
        return tuple(islice(found.values(), MAX_NEIGHBOURS))


def _choice(node_id: str, holders: dict[str, tuple[str, Neighbour]], count: int) -> dict[str, Neighbour]:
    start = zlib.crc32(node_id.encode()) % len(holders)
    turned = chain(islice(holders.items(), start, None), islice(holders.items(), start))
    others = ((shard_id, neighbour) for shard_id, (owner, neighbour) in turned if owner != node_id)
    return dict(islice(others, count))


def _kin(shard: Shard) -> _Kin:
    return shard.artifact_digest, shard.compatibility_id


def _range(shard: Shard) -> _Range:
    return shard.layers.start, shard.layers.end, shard.n_layer, bool(shard.cuts)


def _meets(own: _Range, other: _Range) -> bool:
    own_head, own_tail = own[0] == 0, own[1] == own[2]
    other_head, other_tail = other[0] == 0, other[1] == other[2]
    return (own_head and other_tail) or (own_tail and other_head) or own[1] == other[0] or other[1] == own[0]


def _overlaps(own: _Range, other: _Range) -> bool:
    # Where either can be cut, a route may go from one to the other.
    return (own[3] or other[3]) and own[0] < other[1] and other[0] < own[1]
