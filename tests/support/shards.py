"""Shards made up for tests of everything that only reads their description."""

from __future__ import annotations

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
    address: str = "127.0.0.1:1",
    capacity_tokens: int = 512,
    cuts: Sequence[int] = (),
) -> Shard:
    """A shard of ``layers`` (``START:END``); boundaries that are not given are those of an unbroken chain, and so are
    those at ``cuts``."""
    where = LayerRange.parse(layers)
    return Shard(
        shard_id=shard_id,
        address=address,
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


def advertise(shard: Shard, load: ShardLoad | None = None) -> ShardAdvertisement:
    return ShardAdvertisement(shard=shard, worker_key=WORKER_KEY, load=load or ShardLoad())
