"""Runs the planner: from what is wanted and what nodes lend to what each of them is told to hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from meshnet.artifact.library import fits
from meshnet.artifact.manifest import Manifest
from meshnet.core import LayerRange
from meshnet.errors import ArtifactError, MeshnetError
from meshnet.planner.model_facts import ModelFacts
from meshnet.planner.model_reading import facts_of
from meshnet.planner.snapshot import Held, NodeFacts, Placement, Wanted
from meshnet.tracker.artifacts import Artifacts
from meshnet.tracker.cuts import KnownCuts
from meshnet.tracker.decisions import decide
from meshnet.tracker.messages import Assignment
from meshnet.tracker.nodes import LEFT, LIVE, Node
from meshnet.tracker.recipes import Recipe, unmatched, wanted_artifacts
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.stock import fixed_facts, layer_us, reported

log = logging.getLogger(__name__)

#: Nodes that are started together are planned for together: after a newcomer others are waited for so long …
JOIN_S = 2.0
#: … but not longer than this in all.
MAX_JOIN_S = 10.0
#: A node that lends reports every second, and a lost worker at once. If it is silent for so long when sessions miss its
#: shard, or still offers that so long after, it is taken for lost.
PATIENCE_S = 2.0
#: Sessions that wait for a shard ask again within this time.
URGENT_S = 5.0
#: A node that has been failing at a range of an artifact for so long is not given any of it …
FAILING_S = 30.0
#: … until this has passed.
EXCLUDED_S = 600.0


@dataclass(frozen=True)
class _Deployed:
    """An artifact that is wanted, with its facts; ``want.model`` is how the planner calls it."""

    digest: str
    name: str
    want: Wanted


@dataclass
class _Lost:
    """When gateways reported a shard lost, first and last."""

    first_s: float
    last_s: float


class Placements:
    """The assignments of one tracker. Nobody is told anything before every node that is there has reported.

    ``open_on`` counts the open sessions of a shard.
    """

    def __init__(
        self,
        registry: Registry,
        artifacts: Artifacts,
        settings: TrackerSettings,
        recipes: Sequence[Recipe] = (),
        *,
        open_on: Callable[[str], int] = lambda shard_id: 0,
    ) -> None:
        self._registry = registry
        self._artifacts = artifacts
        self._settings = settings
        self._recipes = recipes
        self._open_on = open_on
        self._cuts = KnownCuts()
        #: Shards that it has learned from, of those that are there.
        self._learned: set[str] = set()
        self._facts: dict[str, ModelFacts | None] = {}
        self._deployed: dict[str, _Deployed] = {}
        self._unclear: dict[str, int] = {}
        #: What each node was told, by digest; also of those that vanished a moment ago.
        self._placed: dict[str, dict[str, LayerRange]] = {}
        self._told: dict[str, tuple[Assignment, ...]] = {}
        #: Ranges that nodes chose themselves, with these nodes, as they were last seen.
        self._fixed_seen: dict[str, tuple[str, NodeFacts]] = {}
        self._lost: dict[str, _Lost] = {}
        self._failing: dict[tuple[str, str], float] = {}
        self._excluded: dict[tuple[str, str], float] = {}
        self._began_s: float | None = None
        #: When each node that has not been told anything yet was first seen.
        self._joined_s: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._last: object = None
        self._last_reasons: frozenset[str] = frozenset()

    def assignments(self, node_id: str) -> tuple[Assignment, ...] | None:
        """What a node should hold; None if nothing has been decided about it."""
        return self._told.get(node_id)

    def lost(self, shard_ids: Collection[str]) -> None:
        """Sessions wait for these shards, and nothing can take their place: plan at once."""
        now_s = self._registry.now_s()
        for shard_id in shard_ids:
            self._lost.setdefault(shard_id, _Lost(now_s, now_s)).last_s = now_s
        self._wake.set()

    async def run(self) -> None:
        """Plan until cancelled: now and then, and whenever `lost` is called. Begun when the registry is restored."""
        while True:
            self._wake.clear()
            try:
                await self.plan()
            except MeshnetError as error:
                log.error("placement failed, trying again: %s", error)
            except Exception:
                # Whatever it is, nodes that are lost later must be replaced.
                log.exception("placement failed, trying again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.plan_every_s):
                    await self._wake.wait()

    async def plan(self) -> None:
        """Look at the nodes, and decide anew if anything matters that was not so the last time.

        Raises:
            TrackerUnavailable: the database failed.
        """
        now_s = self._registry.now_s()
        if self._began_s is None:
            self._began_s = now_s
        if not self._placed and all(node.capacity is None for node in self._registry.live()):
            return
        nodes = self._registry.nodes()
        if any(node.state == LIVE and node.reported_s < self._began_s for node in nodes):
            return  # after a restart: what it holds is not known yet
        self._look(nodes, now_s)
        if self._are_joining(nodes, now_s):
            return
        self._deployed = await self._deployments()
        names = {digest: deployed.want.model for digest, deployed in self._deployed.items()}
        lent = [facts for node in nodes if (facts := self._lent(node, names, now_s)) is not None]
        fixed, missing = self._fixed(nodes, {facts.node_id for facts in lent}, names, now_s)
        lent += missing
        wanted = [deployed.want for deployed in self._deployed.values()]
        urgent = any(self._is_urgent(lost, now_s) for lost in self._lost.values())
        gone = {node.node_id for node in nodes if node.state == LEFT}
        busy = {node.node_id for node in nodes if any(self._open_on(shard_id) for shard_id in node.shards)}
        grace_s = self._settings.placement_grace_s
        reserved = {facts.node_id: now_s - facts.vanished_s < grace_s for facts in lent if facts.vanished_s is not None}
        # Sessions matter only to who may move.
        seen = (
            [_substance(facts) for facts in (*lent, *fixed)],
            [(want.model, want.context_tokens, want.sessions, want.replicas, want.facts.legal_cuts) for want in wanted],
            (urgent, gone, reserved, busy if reserved else None),
        )
        if seen == self._last:
            return
        placement = await asyncio.to_thread(
            decide, lent, fixed, wanted, now_s=now_s, grace_s=grace_s, urgent=urgent, gone=gone, busy=busy
        )
        self._last = seen
        self._tell(placement, {facts.node_id for facts in lent if facts.vanished_s is None})

    def _look(self, nodes: Sequence[Node], now_s: float) -> None:
        """Take note of what nodes found out about cuts and failed at, and forget what is over."""
        failing = set()
        for node in nodes:
            for shard_id, advertised in node.shards.items():
                if shard_id not in self._learned:
                    self._cuts.learn(advertised.shard)
            for activity in node.activities if node.state == LIVE else ():
                if activity.refused:
                    self._cuts.refuse(activity.artifact_digest, activity.layers)
                elif activity.state == "failed":
                    failing.add((node.node_id, activity.artifact_digest))
            if node.state == LIVE and node.capacity is None and node.shards:
                # Started again with layers of its own.
                self._placed.pop(node.node_id, None)
                self._told.pop(node.node_id, None)
            over = node.state != LIVE and now_s - node.reported_s >= self._settings.placement_grace_s
            if over and self._placed.pop(node.node_id, None) is not None:
                self._told.pop(node.node_id, None)
        self._learned = {shard_id for node in nodes for shard_id in node.shards}
        for pair in failing:
            if now_s - self._failing.setdefault(pair, now_s) >= FAILING_S:
                self._excluded[pair] = now_s + EXCLUDED_S
        self._failing = {pair: since_s for pair, since_s in self._failing.items() if pair in failing}
        self._excluded = {pair: until_s for pair, until_s in self._excluded.items() if until_s > now_s}
        grace_s = self._settings.placement_grace_s
        self._lost = {shard_id: lost for shard_id, lost in self._lost.items() if now_s - lost.last_s < grace_s}

    def _are_joining(self, nodes: Sequence[Node], now_s: float) -> bool:
        """Whether nodes have just come of which nothing was known: more may follow."""
        new = [
            node.node_id
            for node in nodes
            if node.state == LIVE
            and node.capacity is not None
            and node.node_id not in self._placed
            and not reported(node)
        ]
        self._joined_s = {node_id: self._joined_s.get(node_id, now_s) for node_id in new}
        if not new or self._lost:
            return False
        return now_s - max(self._joined_s.values()) < JOIN_S and now_s - min(self._joined_s.values()) < MAX_JOIN_S

    async def _deployments(self) -> dict[str, _Deployed]:
        found: dict[str, _Deployed] = {}
        published = self._artifacts.all()
        unclear = unmatched(self._recipes, published)
        if unclear != self._unclear:
            self._unclear = unclear
            for artifact, n_fitting in unclear.items():
                log.warning("cannot deploy %s: %d published artifacts fit, not one", artifact, n_fitting)
        for wanted in wanted_artifacts(self._recipes, published):
            facts = await self._facts_of(wanted.digest)
            if facts is None:
                continue
            taken = {deployed.want.model for deployed in found.values()}
            name = wanted.name if wanted.name not in taken else f"{wanted.name}@{wanted.digest[7:15]}"
            found[wanted.digest] = _Deployed(
                wanted.digest,
                wanted.name,
                Wanted(
                    facts=self._cuts.applied(wanted.digest, facts).model_copy(update={"name": name}),
                    context_tokens=min(wanted.context_tokens, facts.n_ctx_train or wanted.context_tokens),
                    sessions=wanted.sessions,
                    replicas=wanted.replicas,
                ),
            )
        return found

    async def _facts_of(self, digest: str) -> ModelFacts | None:
        """Facts of a published artifact; None if it is nothing that could be served."""
        if digest not in self._facts:
            publication = await self._artifacts.get(digest)

            def read() -> ModelFacts:
                manifest = Manifest.parse(publication.manifest)
                return facts_of(manifest.artifact, manifest.name)

            try:
                self._facts[digest] = await asyncio.to_thread(read)
            except ArtifactError as error:
                log.warning("artifact %s cannot be placed: %s", digest, error)
                self._facts[digest] = None
        return self._facts[digest]

    def _lent(self, node: Node, names: dict[str, str], now_s: float) -> NodeFacts | None:
        """A node that lends capacity, or did until a moment ago."""
        placed = self._placed.get(node.node_id)
        is_here = node.state == LIVE and node.capacity is not None
        if not is_here and (placed is None or (node.state == LIVE and node.shards)):
            return None
        held = placed if placed is not None else reported(node)
        vanished_s = self._missing_since_s(node, now_s) if is_here else node.reported_s
        capacity = node.capacity
        return NodeFacts(
            node_id=node.node_id,
            memory_bytes=capacity.memory_bytes if capacity is not None else 0,
            disk_bytes=capacity.disk_bytes if capacity is not None else None,
            held=tuple(Held(names[digest], layers) for digest, layers in sorted(held.items()) if digest in names),
            layer_us=layer_us(node, names),
            vanished_s=vanished_s,
            models=self._allowed(node, names),
        )

    def _fixed(
        self, nodes: Sequence[Node], lent: Collection[str], names: dict[str, str], now_s: float
    ) -> tuple[list[NodeFacts], list[NodeFacts]]:
        """Ranges of nodes that chose them themselves; and such ranges that were there until a moment ago."""
        states = {node.node_id: node.state for node in nodes}
        for node in nodes:
            if node.state == LIVE and node.node_id not in lent:
                seen_s = self._missing_since_s(node, now_s) or now_s
                for key, facts in fixed_facts(node, names, seen_s).items():
                    self._fixed_seen[key] = (node.node_id, facts)
        kept = {}
        for key, (owner, facts) in self._fixed_seen.items():
            away_s = now_s - (facts.vanished_s or now_s)
            is_known = owner not in lent and all(held.model in names.values() for held in facts.held)
            if is_known and away_s < self._settings.placement_grace_s and states.get(owner, LEFT) != LEFT:
                kept[key] = (owner, facts)
        self._fixed_seen = kept
        # A worker that died is back in a moment.
        here: list[NodeFacts] = []
        missing: list[NodeFacts] = []
        for _, facts in kept.values():
            (here if now_s - (facts.vanished_s or now_s) < PATIENCE_S else missing).append(facts)
        return here, missing

    def _missing_since_s(self, node: Node, now_s: float) -> float | None:
        """Since when a node is taken for lost although its lease is good: gateways do not reach its shards."""
        patience_s = PATIENCE_S if node.capacity is not None else max(PATIENCE_S, 1.5 * self._settings.heartbeat_s)
        for shard_id, lost in self._lost.items():
            if shard_id.startswith(f"{node.node_id}/"):
                silent = node.reported_s < lost.first_s and now_s - node.reported_s > patience_s
                unreachable = shard_id in node.shards and now_s - lost.first_s > patience_s
                if silent or unreachable:
                    return lost.first_s
        return None

    def _is_urgent(self, lost: _Lost, now_s: float) -> bool:
        """Whether sessions still wait for a shard: one report alone may have been about a slow moment."""
        return now_s - lost.last_s < URGENT_S and lost.last_s - lost.first_s >= PATIENCE_S

    def _allowed(self, node: Node, names: dict[str, str]) -> frozenset[str] | None:
        only = node.capacity.artifact if node.capacity is not None else None
        allowed = {
            name
            for digest, name in names.items()
            if (node.node_id, digest) not in self._excluded
            and (only is None or fits(only, digest, self._deployed[digest].name))
        }
        return None if len(allowed) == len(names) else frozenset(allowed)

    def _tell(self, placement: Placement, present: Collection[str]) -> None:
        digests = {deployed.want.model: deployed for deployed in self._deployed.values()}
        now_s = self._registry.now_s()
        waited_for = any(now_s - lost.last_s < URGENT_S for lost in self._lost.values())
        for node_id in sorted(present):
            held_here = placement.ranges.get(node_id, ())
            placed = dict(sorted((digests[held.model].digest, held.layers) for held in held_here))
            # Until nobody waits any more: the node may not have asked meanwhile.
            calm = {one.artifact_digest: one.layers for one in self._told.get(node_id, ()) if not one.urgent}
            told = tuple(
                _assignment(self._deployed[digest], layers, urgent=waited_for and calm.get(digest) != layers)
                for digest, layers in placed.items()
            )
            if placed != self._placed.get(node_id):
                what = ", ".join(f"{one.layers} of {one.model}" for one in told) or "nothing"
                log.info("node %s is to hold %s", node_id, what)
            self._placed[node_id], self._told[node_id] = placed, told
        reasons = frozenset(placement.reasons)
        for reason in placement.reasons:
            if reason not in self._last_reasons:
                log.debug("placement: %s", reason)
        for model, layers in placement.uncovered.items():
            lacking = f"layers {', '.join(map(str, layers))} of {model} fit on no node" if layers else ""
            if lacking:
                reasons |= {lacking}
                if lacking not in self._last_reasons:
                    log.warning("%s", lacking)
        self._last_reasons = reasons


def _substance(facts: NodeFacts) -> NodeFacts:
    """Without what changes all the time, and alone is no reason to plan anew: speed, and a little of the disk."""
    disk_gb = None if facts.disk_bytes is None else facts.disk_bytes >> 30
    return replace(facts, layer_us=(), vanished_s=None, disk_bytes=disk_gb)


def _assignment(deployed: _Deployed, layers: LayerRange, *, urgent: bool) -> Assignment:
    want = deployed.want
    return Assignment(
        artifact_digest=deployed.digest,
        model=deployed.name,
        layers=layers,
        context_tokens=want.context_tokens,
        sessions=want.sessions,
        memory_bytes=want.facts.memory_bytes(layers, want.context_tokens, want.sessions),
        urgent=urgent,
    )
