"""Shards made up for tests of everything that only reads their description."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from meshnet.core import Boundary, Cut, LayerRange, Shard
from meshnet.tracker.messages import ShardAdvertisement, ShardLoad

WORKER_KEY = "5f" * 32


def make_shard(
    shard_id: str,
    layers: str,
    *,
    n_layer: int = 8,
    model: str = "tiny",
    artifact: str = "sha256:aa",
    build: str = "build-1",
    boundary_in: str | None = None,
    boundary_out: str | None = None,
    slots: int = 4,
    address: str = "",
    capacity_tokens: int = 512,
    cuts: Sequence[int] = (),
) -> Shard:
    """A shard of ``layers`` (``START:END``); boundaries that are not given are those of an unbroken chain, and so are
    those at ``cuts``."""
    where = LayerRange.parse(layers)
    return Shard(
        shard_id=shard_id,
        address=address or unused_address(shard_id),
        model=model,
        artifact_digest=artifact,
        architecture="test",
        n_layer=n_layer,
        layers=where,
        boundary_in=Boundary(digest=boundary_in or ("empty" if where.start == 0 else "residual")),
        boundary_out=Boundary(digest=boundary_out or ("empty" if where.end == n_layer else "residual")),
        compatibility_id=build,
        build_id=f"{build} g++",
        engine="test",
        n_ctx_train=1024,
        session_capacity_tokens=capacity_tokens,
        session_slots=slots,
        max_step_tokens=64,
        cuts=tuple(Cut(layer=layer, boundary=Boundary(digest="residual")) for layer in cuts),
    )


def unused_address(shard_id: str) -> str:
    """On loopback, the shard's own; nobody listens there."""
    host = zlib.crc32(shard_id.encode())
    return f"127.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}:1"


def advertise(shard: Shard, load: ShardLoad | None = None) -> ShardAdvertisement:
    return ShardAdvertisement(shard=shard, worker_key=WORKER_KEY, load=load or ShardLoad())
