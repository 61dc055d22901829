"""The shape of a shard: where a route may enter and leave it. Shards share shapes, and a search walks them fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshnet.core import Boundary, Shard

#: Shards that may stand in one route: same artifact, same build compatibility, same number of layers.
Kin = tuple[str, str, int]

#: Where a route stands between two hops: the next layer and the digest of the boundary it brings there.
Place = tuple[int, str]

_DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4}

#: Shapes are remembered per shard object; a mesh has a few thousand of them.
_MAX_REMEMBERED = 16_384


@dataclass(frozen=True, eq=False, slots=True)
class Shape:
    """Shards with equal shapes can replace each other anywhere.

    ``places`` are those where a route may enter (all but the last) and leave (all but the first), in order of layers;
    ``cut_bytes`` are the boundary's bytes per token there.
    """

    kin: Kin
    places: tuple[Place, ...]
    cut_bytes: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.places[0][0]

    @property
    def end(self) -> int:
        return self.places[-1][0]

    @property
    def sort_key(self) -> tuple[Kin, tuple[Place, ...], tuple[int, ...]]:
        return self.kin, self.places, self.cut_bytes


_by_shard: dict[int, tuple[Shard, Shape]] = {}
_by_value: dict[tuple[Kin, tuple[Place, ...], tuple[int, ...]], Shape] = {}


def shape_of(shard: Shard) -> Shape:
    """The shape of ``shard``: the same object for all shards of the same shape."""
    # By identity: a shard cannot change, and to compare or hash all of one takes longer than to route through it.
    known = _by_shard.get(id(shard))
    if known is not None and known[0] is shard:
        return known[1]
    kin = (shard.artifact_digest, shard.compatibility_id, shard.n_layer)
    boundaries = {shard.layers.start: shard.boundary_in, shard.layers.end: shard.boundary_out}
    for cut in shard.cuts:
        if shard.layers.start < cut.layer < shard.layers.end:
            boundaries.setdefault(cut.layer, cut.boundary)
    order = sorted(boundaries.items())
    places = tuple((layer, boundary.digest) for layer, boundary in order)
    cut_bytes = tuple(boundary_bytes(boundary) for _, boundary in order)
    if len(_by_shard) >= _MAX_REMEMBERED:
        _by_shard.clear()
        _by_value.clear()
    shape = _by_value.setdefault((kin, places, cut_bytes), Shape(kin, places, cut_bytes))
    # The shard is kept with it: while it is, nothing else can have its id.
    _by_shard[id(shard)] = (shard, shape)
    return shape


def boundary_bytes(boundary: Boundary) -> int:
    """Bytes per token that cross there."""
    return sum(_DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in boundary.tensors)
