"""Advertisements that are well-formed and still cannot be right."""

from __future__ import annotations

import re

from meshnet.core import Shard

#: Far above anything that exists; what is beyond was never counted.
MAX_TOKENS = 1 << 31
MAX_SLOTS = 1 << 20
MAX_BYTES = 1 << 60
MAX_LAYERS = 10_000

#: Of engines that compute without a file.
TEST_ENGINE = "test"


def implausible(node_id: str, shard: Shard) -> str | None:
    """Why this node's shard cannot be what it says; None if it can."""
    if "/" in shard.shard_id and not shard.shard_id.startswith(f"{node_id}/"):
        return f"the ids of this node's shards begin with {node_id}/"
    if shard.engine != TEST_ENGINE and not re.fullmatch(r"sha256:[0-9a-f]{64}", shard.artifact_digest):
        return f"artifact digest {shard.artifact_digest} is not sha256: and 64 hex digits"
    port = int(shard.address.rpartition(":")[2])
    if not 1 <= port <= 65535:
        return f"address {shard.address} has no port"
    if shard.n_layer > MAX_LAYERS:
        return f"no model has {shard.n_layer} layers"
    for name in ("n_ctx_train", "session_capacity_tokens", "max_step_tokens"):
        if getattr(shard, name) > MAX_TOKENS:
            return f"{name} {getattr(shard, name)} is out of range"
    if shard.session_slots > MAX_SLOTS:
        return f"session_slots {shard.session_slots} is out of range"
    for name in ("weight_bytes", "kv_bytes", "compute_bytes", "kv_bytes_per_token"):
        if getattr(shard, name) > MAX_BYTES:
            return f"{name} {getattr(shard, name)} is out of range"
    cuts = [cut.layer for cut in shard.cuts]
    if cuts != sorted(set(cuts)) or any(not shard.layers.start < layer < shard.layers.end for layer in cuts):
        return f"its cuts are not layers inside {shard.layers} in order"
    return None
