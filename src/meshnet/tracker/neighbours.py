"""Which workers a node may come to talk to: it is told to measure the way to them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from meshnet.core import Shard
from meshnet.tracker.messages import Neighbour

MAX_NEIGHBOURS = 16


def neighbours(node_id: str, own: Iterable[Shard], others: Iterable[Shard]) -> tuple[Neighbour, ...]:
    """Of ``others``, the workers that may stand next to one of ``own`` in a route, at most 16.

    First those that begin where one of them ends, or the other way round (a tail sends its tokens to the head). If they
    are too many, every node gets a choice of its own, so that together they measure many pairs.
    """
    mine: dict[tuple[str, str], list[Shard]] = {}
    for shard in own:
        mine.setdefault((shard.artifact_digest, shard.compatibility_id), []).append(shard)
    found: list[tuple[bool, int, str, str]] = []
    for other in others:
        near = [
            _meets(shard, other)
            for shard in mine.get((other.artifact_digest, other.compatibility_id), ())
            if _meets(shard, other) or _overlaps(shard, other)
        ]
        if near:
            own_choice = zlib.crc32(f"{node_id}\n{other.shard_id}".encode())
            found.append((not any(near), own_choice, other.shard_id, other.address))
    found.sort()
    return tuple(Neighbour(shard_id=shard_id, address=address) for _, _, shard_id, address in found[:MAX_NEIGHBOURS])


def _meets(shard: Shard, other: Shard) -> bool:
    ring = (shard.is_head and other.is_tail) or (shard.is_tail and other.is_head)
    return ring or shard.layers.end == other.layers.start or other.layers.end == shard.layers.start


def _overlaps(shard: Shard, other: Shard) -> bool:
    # Where either can be cut, a route may go from one to the other.
    if not shard.cuts and not other.cuts:
        return False
    return shard.layers.start < other.layers.end and other.layers.start < shard.layers.end
