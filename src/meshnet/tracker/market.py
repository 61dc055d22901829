"""What routing looks at, made from the registry and the open sessions: the shards offered now, and the links between
their nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshnet.core import Replacement
from meshnet.planner.offers import NO_LINKS, Link, Links, Offer
from meshnet.tracker.messages import ShardAdvertisement
from meshnet.tracker.open_sessions import OpenSessions
from meshnet.tracker.registry import Registry

#: Links are measured now and then, and looked at for every session: they are read this often.
LINKS_S = 2.0

#: Of fewer tokens nothing follows: every shard starts with the few of a probe, and those found it cold.
MEASURED_TOKENS = 64

#: What a shard was given lately fades; an offer that tells of it is made anew after this.
FRESH_S = 1.0


@dataclass(slots=True)
class _Known:
    """A shard as its last report has it; ``offer`` is good until ``until_s``."""

    advertised: ShardAdvertisement
    node_id: str
    offer: Offer | None = None
    until_s: float = math.inf

    def offer_with(self, given: int, lately: float) -> Offer:
        """The offer, if ``given`` sessions came since the report."""
        shard, load = self.advertised.shard, self.advertised.load
        # What the worker counted itself, and what was sent there since: a session whose gateway has vanished stays
        # open here until its lease ends, on the worker only until it notices.
        taken, layers = load.open_sessions + given, len(shard.layers)
        return Offer(
            shard,
            busy=(taken + load.queued_frames) / shard.session_slots,
            node_id=self.node_id,
            free_slots=shard.session_slots - taken,
            prefill_us=_rate(load.prefill_compute_us, load.prefill_tokens, layers),
            decode_us=_rate(load.decode_compute_us, load.decode_tokens, layers),
            recent=lately,
        )


class Market:
    """A view of both. An offer is made when its shard reports or its sessions change, not whenever it is looked at."""

    def __init__(self, registry: Registry, open_sessions: OpenSessions) -> None:
        self._registry = registry
        self._open = open_sessions
        self._known: dict[str, _Known] = {}
        self._links: Links = NO_LINKS
        self._links_read_s = -math.inf

    def offers(
        self, model: str | None = None, *, artifact_digest: str | None = None, for_repair: bool = False
    ) -> list[Offer]:
        """Every ready shard that takes sessions now, with its load; of one model, of one artifact. ``for_repair`` also
        those that only lack a free slot for their probe."""
        now_s = self._registry.now_s()
        is_ready, known = self._registry.may_repair if for_repair else self._registry.is_ready, self._known
        for shard_id in self._open.take_changed():
            if shard_id in known:
                known[shard_id].offer = None
        found: list[Offer] = []
        for node in self._registry.live():
            for shard_id, advertised in node.shards.items():
                one = known.get(shard_id)
                if one is None or one.advertised is not advertised:
                    one = known[shard_id] = _Known(advertised, node.node_id)
                shard = advertised.shard
                if (model is not None and shard.model != model) or advertised.load.draining:
                    continue
                if (artifact_digest is not None and shard.artifact_digest != artifact_digest) or not is_ready(shard_id):
                    continue
                offer = one.offer
                if offer is None or now_s >= one.until_s:
                    offer = self._renew(shard_id, one, node.reported_s)
                found.append(offer)
        return found

    def node_of(self, shard_id: str) -> str:
        """The node of a shard that was just offered."""
        return self._known[shard_id].node_id

    def worker_key(self, shard_id: str) -> bytes:
        """What tickets for a shard that was just offered are signed with."""
        return bytes.fromhex(self._known[shard_id].advertised.worker_key)

    def origin(self, shard_id: str) -> Replacement:
        """How a shard that was just offered came to be."""
        advertised = self._known[shard_id].advertised
        return Replacement(shard=shard_id, pull_ms=advertised.pull_ms, load_ms=advertised.load_ms)

    def links(self) -> Links:
        """What nodes measured of the ways to each other; a moment old at most."""
        now_s = self._registry.now_s()
        if now_s >= self._links_read_s + LINKS_S:
            self._links, self._links_read_s = self._measured(), now_s
        return self._links

    def tidy(self) -> None:
        """Forget shards that are gone. To be called now and then."""
        there = {shard_id for node in self._registry.live() for shard_id in node.shards}
        for shard_id in self._known.keys() - there:
            del self._known[shard_id]

    def _renew(self, shard_id: str, one: _Known, reported_s: float) -> Offer:
        now_s = self._registry.now_s()
        lately = self._open.given_lately(shard_id, now_s)
        one.offer = one.offer_with(self._open.given_since(shard_id, reported_s), lately)
        one.until_s = now_s + FRESH_S if lately else math.inf
        return one.offer

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


def _rate(total_us: int, tokens: int, layers: int) -> float | None:
    """Microseconds per layer and token; None where too little was measured to tell."""
    return total_us / tokens / layers if tokens >= MEASURED_TOKENS and total_us else None
