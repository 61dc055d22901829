"""What routing looks at, made from the registry and the open sessions: the shards offered now, and the links between
their nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshnet.core import Replacement
from meshnet.planner.offers import NO_LINKS, Link, Links, Offer
from meshnet.tracker.open_sessions import OpenSessions
from meshnet.tracker.registry import Registry

#: Links are measured now and then, and looked at for every session: they are read this often.
LINKS_S = 2.0


@dataclass(frozen=True)
class Offered:
    """Shards that take sessions now; by shard id, the keys of their workers as hex digits, and how they came to be."""

    offers: list[Offer]
    keys: dict[str, str]
    origins: dict[str, Replacement]


class Market:
    """A view of both; it keeps nothing but links."""

    def __init__(self, registry: Registry, open_sessions: OpenSessions) -> None:
        self._registry = registry
        self._open = open_sessions
        self._links: Links = NO_LINKS
        self._links_read_s = -math.inf

    def offered(self, model: str | None = None, *, artifact_digest: str | None = None) -> Offered:
        """Every ready shard that takes sessions now, with its load; of one model, of one artifact."""
        now_s = self._registry.now_s()
        found = Offered([], {}, {})
        for node in self._registry.live():
            for shard_id, advertised in node.shards.items():
                shard, load = advertised.shard, advertised.load
                if (model is not None and shard.model != model) or load.draining:
                    continue
                if artifact_digest is not None and shard.artifact_digest != artifact_digest:
                    continue
                if not self._registry.is_ready(shard_id):
                    continue
                # What the worker counted itself, and what was sent there since: a session whose gateway has vanished
                # stays open here until its lease ends, on the worker only until it notices.
                taken = load.open_sessions + self._open.given_since(shard_id, node.reported_s)
                layers = len(shard.layers)
                found.offers.append(
                    Offer(
                        shard,
                        busy=(taken + load.queued_frames) / shard.session_slots,
                        node_id=node.node_id,
                        free_slots=shard.session_slots - taken,
                        prefill_us=_rate(load.prefill_compute_us, load.prefill_tokens * layers),
                        decode_us=_rate(load.decode_compute_us, load.decode_tokens * layers),
                        recent=self._open.given_lately(shard_id, now_s),
                    )
                )
                found.keys[shard_id] = advertised.worker_key
                found.origins[shard_id] = Replacement(
                    shard=shard_id, pull_ms=advertised.pull_ms, load_ms=advertised.load_ms
                )
        return found

    def links(self) -> Links:
        """What nodes measured of the ways to each other; a moment old at most."""
        now_s = self._registry.now_s()
        if now_s >= self._links_read_s + LINKS_S:
            self._links, self._links_read_s = self._measured(), now_s
        return self._links

    def _measured(self) -> Links:
        nodes = list(self._registry.live())
        on = {shard_id: node.node_id for node in nodes for shard_id in node.shards}
        links: dict[tuple[str, str], Link] = {}
        for node in nodes:
            for measured in node.links:
                to = on.get(measured.shard_id)
                if to is not None:
                    links[node.node_id, to] = Link(measured.rtt_ms, measured.bytes_per_s)
        return links


def _rate(total_us: int, n: int) -> float | None:
    """Microseconds per layer and token; None where nothing was measured."""
    return total_us / n if n and total_us else None
