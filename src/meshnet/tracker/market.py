"""What routing looks at, made from the registry and the open sessions: the shards offered now, and the links between
their nodes.

Sessions are opened often, and nodes are many: what has changed since the last look is looked at, not everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, overload

from meshnet.core import Replacement
from meshnet.planner.coverage import HeldUp
from meshnet.planner.offers import Link, Links, Offer
from meshnet.tracker.messages import LinkMeasure, ShardAdvertisement
from meshnet.tracker.nodes import Node
from meshnet.tracker.open_sessions import OpenSessions
from meshnet.tracker.registry import Registry

#: Of fewer tokens nothing follows: every shard starts with the few of a probe, and those found it cold.
MEASURED_TOKENS = 64

#: What a shard was given lately fades; an offer that tells of it is made anew after this.
FRESH_S = 1.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Known:
    """A shard as its last report has it."""

    advertised: ShardAdvertisement
    node_id: str
    reported_s: float

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
            prefill_seen_us=load.prefill_compute_us,
            decode_seen_us=load.decode_compute_us,
        )


class Market:
    """A view of both. An offer is made when its shard reports or its sessions change, not whenever it is looked at."""

    def __init__(self, registry: Registry, open_sessions: OpenSessions) -> None:
        self._registry = registry
        self._open = open_sessions
        self._known: dict[str, _Known] = {}
        self._of_node: dict[str, frozenset[str]] = {}
        #: By model and shard: those that take sessions, ready or not.
        self._offers: dict[str, dict[str, Offer]] = {}
        #: Shards whose offers tell of what they were given lately, and until when that is good; the first ends first.
        self._fading: dict[str, float] = {}
        self._links = MeasuredLinks(registry)
        registry.reported = self._report

    def offers(
        self, model: str | None = None, *, artifact_digest: str | None = None, for_repair: bool = False
    ) -> list[Offer]:
        """Every ready shard that takes sessions now, with its load; of one model, of one artifact. ``for_repair`` also
        those that only lack a free slot for their probe."""
        self._refresh()
        is_ready = self._registry.may_repair if for_repair else self._registry.is_ready
        silent = self._silent()
        models = self._offers.values() if model is None else (self._offers.get(model, {}),)
        return [
            offer
            for offers in models
            for shard_id, offer in offers.items()
            if is_ready(shard_id)
            and shard_id not in silent
            and (artifact_digest is None or offer.shard.artifact_digest == artifact_digest)
        ]

    def held_up(self, model: str, *, artifact_digest: str | None = None) -> list[HeldUp]:
        """Shards of a model that would take sessions if they were ready, and why they are not."""
        silent = self._silent()
        return [
            HeldUp(offer.shard, reason)
            for shard_id, offer in self._offers.get(model, {}).items()
            if (reason := self._registry.why_not_ready(shard_id)) is not None
            and shard_id not in silent
            and (artifact_digest is None or offer.shard.artifact_digest == artifact_digest)
        ]

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
        """What nodes measured of the ways to each other, as it is whenever it is looked at."""
        return self._links

    def _silent(self) -> set[str]:
        """Shards whose node may be gone already."""
        return {shard_id for node in self._registry.silent() for shard_id in node.shards}

    def _report(self, node: Node) -> None:
        """Take over what a node has told, or that it is gone."""
        before, there = self._of_node.pop(node.node_id, frozenset()), frozenset(node.shards)
        for shard_id in before - there:
            # It may be another node's by now.
            if self._known[shard_id].node_id == node.node_id:
                self._withdraw(shard_id)
                del self._known[shard_id]
                self._fading.pop(shard_id, None)
        if there:
            self._of_node[node.node_id] = there
        if not node.links:
            self._links.forget(node.node_id)
        now_s = self._registry.now_s()
        for shard_id, advertised in node.shards.items():
            known = self._known.get(shard_id)
            # A malformed report renews the lease, and tells nothing of sessions: those given since the last good one
            # still count.
            if known is None or known.advertised is not advertised:
                self._withdraw(shard_id)
                self._known[shard_id] = _Known(advertised, node.node_id, node.reported_s)
            self._renew(shard_id, now_s)

    def _refresh(self) -> None:
        """Renew offers that something else has changed than a report."""
        now_s = self._registry.now_s()
        changed = self._open.take_changed()
        for shard_id, until_s in self._fading.items():
            if until_s > now_s:
                break
            changed.add(shard_id)
        for shard_id in changed:
            self._renew(shard_id, now_s)

    def _withdraw(self, shard_id: str) -> None:
        known = self._known.get(shard_id)
        if known is not None:
            model = known.advertised.shard.model
            offers = self._offers.get(model, {})
            offers.pop(shard_id, None)
            if not offers:
                self._offers.pop(model, None)

    def _renew(self, shard_id: str, now_s: float) -> None:
        self._fading.pop(shard_id, None)
        known = self._known.get(shard_id)
        if known is None or known.advertised.load.draining:
            return
        lately = self._open.given_lately(shard_id, now_s)
        offer = known.offer_with(self._open.given_since(shard_id, known.reported_s), lately)
        self._offers.setdefault(offer.shard.model, {})[shard_id] = offer
        if lately:
            self._fading[shard_id] = now_s + FRESH_S


class MeasuredLinks(Mapping[tuple[str, str], Link]):
    """The links that nodes told with their last reports, by (from node, to node). A route looks at few of them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        #: By the node that measured, with what it told.
        self._read: dict[str, tuple[tuple[LinkMeasure, ...], dict[str, Link]]] = {}

    @overload
    def get(self, key: tuple[str, str]) -> Link | None: ...
    @overload
    def get(self, key: tuple[str, str], default: _T) -> Link | _T: ...
    def get(self, key: tuple[str, str], default: object = None) -> object:
        return self._from(key[0]).get(key[1], default)

    def __getitem__(self, key: tuple[str, str]) -> Link:
        return self._from(key[0])[key[1]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((node.node_id, to) for node in self._registry.live() for to in self._from(node.node_id))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(node.links for node in self._registry.live())

    def forget(self, node_id: str) -> None:
        """It tells of none any more."""
        self._read.pop(node_id, None)

    def _from(self, node_id: str) -> dict[str, Link]:
        node = self._registry.node(node_id)
        if node is None or not node.links:
            return {}
        told, links = self._read.get(node_id, ((), {}))
        if told is not node.links:
            owner = self._registry.owner
            links = {
                to: Link(measured.rtt_ms, measured.bytes_per_s)
                for measured in node.links
                if (to := owner(measured.shard_id)) is not None
            }
            self._read[node_id] = node.links, links
        return links


def _rate(total_us: int, tokens: int, layers: int) -> float | None:
    """Microseconds per layer and token; None where too little was measured to tell."""
    return total_us / tokens / layers if tokens >= MEASURED_TOKENS and total_us else None
