"""Who is there and what they offer: leases, heartbeats, advertised shards, models ever seen.

Memory is the working state; the database gets every change of membership, lease or offer (not every heartbeat), so a
restarted tracker knows its nodes again and gives each a fresh lease period to report.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from weakref import WeakValueDictionary

from meshnet.core import Shard
from meshnet.errors import LeaseLost, TrackerUnavailable
from meshnet.tracker.database import Database
from meshnet.tracker.group_writer import GroupWriter
from meshnet.tracker.identity import Challenges, check_identity
from meshnet.tracker.messages import (
    Assignment,
    Challenge,
    Departure,
    Heartbeat,
    HeartbeatAnswer,
    Lease,
    Neighbour,
    Registration,
    ShardAdvertisement,
)
from meshnet.tracker.neighbours import Neighbourhoods
from meshnet.tracker.nodes import (
    LEFT,
    LIVE,
    LOST,
    KnownModel,
    Node,
    RefusedShard,
    differs,
    new_models,
    read_kept,
    substance,
    write_node,
    write_proven,
)
from meshnet.tracker.plausible import implausible
from meshnet.tracker.readiness import Readiness
from meshnet.tracker.settings import TrackerSettings

__all__ = ["LEFT", "LIVE", "LOST", "KnownModel", "Node", "Registry"]

log = logging.getLogger(__name__)

#: A node's neighbours are looked for so often: with many nodes, not at every heartbeat.
NEIGHBOURS_S = 10.0
FEW_SHARDS = 32


class Registry:
    """All nodes of one tracker. ``clock`` gives seconds that never jump; leases are measured on it. ``wall_clock`` is
    only for what people read. With ``probing``, shards are ready when `prove` says so, else as soon as they are there.
    """

    def __init__(
        self,
        database: Database,
        settings: TrackerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        probing: bool = False,
    ) -> None:
        self._database = database
        self._writer = GroupWriter(database)
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._nodes: dict[str, Node] = {}
        #: Live nodes; who reported longest ago comes first.
        self._by_report: dict[str, None] = {}
        self._models: dict[tuple[str, str], KnownModel] = {}
        self._challenges = Challenges(self.now_s)
        self._readiness = Readiness(probing=probing)
        #: Whose the advertised shards and their addresses are.
        self._owners: dict[str, str] = {}
        self._at: dict[str, str] = {}
        self._neighbourhoods = Neighbourhoods()
        self._neighbours: dict[str, tuple[float, tuple[Neighbour, ...]]] = {}
        # By node, held over each of its changes, so that memory and database change in the same order. One lock for all
        # would let every heartbeat wait for the database whenever a node comes or goes. Each is there as long as
        # somebody holds it or waits for it: ids come from outside.
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Set whenever a shard has come or gone.
        self.changed = asyncio.Event()
        #: Called with a node that has reported, or whose shards have come or gone. Set by whoever offers them.
        self.reported: Callable[[Node], None] = lambda node: None
        #: What the planner wants of a node; None for a node that takes no orders. Set by whoever plans.
        self.assignments: Callable[[str], tuple[Assignment, ...] | None] = lambda node_id: None

    async def restore(self) -> None:
        """Read what an earlier run left. Live nodes get a whole lease period from now."""
        async with self._database.reading() as session:
            kept = await read_kept(session, reported_s=self.now_s())
        for node in kept.nodes.values():
            shards, node.shards = node.shards, {}
            self._nodes[node.node_id] = node
            if node.state == LIVE:
                self._by_report[node.node_id] = None
            self._replace_shards(node, shards)
            self.reported(node)
        self._readiness.prove(kept.proven)
        self._models = {(model.model, model.artifact_digest): model for model in kept.models}

    def challenge(self, node_id: str) -> Challenge:
        """What a node has to sign to register."""
        return self._challenges.issue(node_id)

    async def register(self, node_id: str, registration: Registration) -> Lease:
        """Give a node a lease with a raised epoch. Whatever it advertised under an earlier lease is withdrawn.

        The first key that registers with an id is bound to it for good. A live lease can be taken over on the same
        machine only: there it is the same node, started again.

        Raises:
            LeaseLost: the challenge is not good any more.
            IdentityRefused: the signature or the key is wrong, or the node is alive on another machine.
        """
        self._challenges.check(node_id, registration)
        async with self._changes_of(node_id):
            known = self._nodes.get(node_id)
            if known is not None:
                live = known.state == LIVE and self._in_time(known)
                silent_s = self.now_s() - known.reported_s if live else None
                check_identity(known, registration, silent_s=silent_s, lease_ttl_s=self._settings.lease_ttl_s)
            node = Node(
                node_id=node_id,
                lease_epoch=known.lease_epoch + 1 if known else 1,
                instance=registration.instance,
                version=registration.version,
                state=LIVE,
                last_seen_unix_s=self._wall_clock(),
                reported_s=self.now_s(),
                public_key=registration.public_key,
                machine=registration.machine,
            )
            await self._store(node)
            if known is not None:
                self._replace_shards(known, {})
            self._nodes[node_id] = node
            self._renew(node)
        log.info("node %s registered, lease epoch %d", node_id, node.lease_epoch)
        return Lease(
            lease_epoch=node.lease_epoch,
            heartbeat_ms=round(self._settings.heartbeat_s * 1000),
            ttl_ms=round(self._settings.lease_ttl_s * 1000),
        )

    async def heartbeat(self, node_id: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Renew a lease and replace what the node advertises.

        A shard that cannot be what it says, or is another node's, is left out and told in ``not_ready``: it costs the
        node neither its lease nor its other shards.

        Raises:
            LeaseLost: the lease is unknown, has run out, or was taken over.
            TrackerUnavailable: the database failed. The lease is renewed and withdrawn shards are gone; new ones are
                not offered before it is back.
        """
        async with self._changes_of(node_id):
            node = self._leased(node_id, beat.lease_epoch, beat.instance)
            offered, refused = self._judge(node, beat.shards)
            if substance(node.shards) != substance(offered):
                # What was proven of a shard says nothing about another one under the same id.
                self._readiness.forget(
                    shard_id for shard_id, one in offered.items() if differs(node.shards.get(shard_id), one)
                )
                try:
                    await self._store(replace(node, shards=offered))
                except TrackerUnavailable:
                    # The node is there all the same, and what it withdrew is gone. What is new waits for the database.
                    kept = {key: one for key, one in offered.items() if key in node.shards}
                    same = {key: one for key, one in kept.items() if not differs(node.shards[key], one)}
                    self._replace_shards(node, same)
                    self._renew(node)
                    raise
            self._replace_shards(node, offered)
            for shard_id in sorted(refused.keys() - node.refused.keys()):
                log.warning("shard %s of node %s refused: %s", shard_id, node_id, refused[shard_id].reason)
            node.refused = refused
            node.capacity, node.links, node.activities = beat.capacity, beat.links, beat.activities
            self._renew(node)
        return HeartbeatAnswer(
            assignments=self.assignments(node_id),
            neighbours=self._neighbours_of(node),
            not_ready=self._not_ready(node),
        )

    async def renew(self, node_id: str, lease_epoch: int, instance: str) -> None:
        """Renew a lease of which nothing else is known: the node's report was malformed.

        Raises:
            LeaseLost: the lease is unknown, has run out, or was taken over.
        """
        async with self._changes_of(node_id):
            self._renew(self._leased(node_id, lease_epoch, instance))

    async def deregister(self, node_id: str, departure: Departure) -> None:
        """End a lease at the node's own wish.

        Raises:
            LeaseLost: the lease is unknown, has run out, or was taken over.
        """
        async with self._changes_of(node_id):
            node = self._leased(node_id, departure.lease_epoch, departure.instance)
            await self._end(node, LEFT)
        log.info("node %s left", node_id)

    async def expire(self) -> tuple[str, ...]:
        """Mark nodes whose lease has run out as lost, and return their ids."""
        lost = []
        for node_id in [node.node_id for node in self._nodes.values() if self._is_late(node)]:
            async with self._changes_of(node_id):
                node = self._nodes[node_id]
                # It may have registered while this waited.
                if self._is_late(node):
                    await self._end(node, LOST)
                    lost.append(node_id)
                    log.warning("node %s lost: no heartbeat for %g s", node_id, self._settings.lease_ttl_s)
        return tuple(lost)

    async def finish(self) -> None:
        """Wait until everything is written."""
        await self._writer.finish()

    async def prove(self, shard_ids: Collection[str]) -> None:
        """A probe has gone through these shards: sessions may use them. Those withdrawn meanwhile are left out."""
        await self._set_proven(shard_ids, proven=True)

    async def doubt(self, shard_ids: Collection[str], reason: str) -> None:
        """Sessions may not use these shards (any more), for this reason."""
        await self._set_proven(shard_ids, proven=False, reason=reason)

    def await_slot(self, shard_ids: Collection[str], reason: str) -> None:
        """The probe of these shards found no free slot, for this reason; otherwise they are what they say."""
        self._readiness.await_slot([shard_id for shard_id in shard_ids if shard_id in self._owners], reason)

    def may_repair(self, shard_id: str) -> bool:
        """Whether a broken route may use the shard if nothing else can take the place of what is lost."""
        return self._readiness.may_repair(shard_id)

    def is_ready(self, shard_id: str) -> bool:
        """Whether sessions may use an advertised shard."""
        return self._readiness.is_ready(shard_id)

    def why_not_ready(self, shard_id: str) -> str | None:
        """Why sessions may not use it; None if they may."""
        return self._readiness.why_not(shard_id)

    def now_s(self) -> float:
        """The registry's clock: seconds that never jump, from an unknown start."""
        return self._clock()

    def nodes(self) -> tuple[Node, ...]:
        """All known nodes by id. A node whose lease has just run out is told as lost even before `expire` ran."""
        good_from_s = self._good_from_s()
        return tuple(
            node
            if node.state != LIVE or node.reported_s > good_from_s
            else replace(node, state=LOST, shards={}, refused={})
            for _, node in sorted(self._nodes.items())
        )

    def node(self, node_id: str) -> Node | None:
        """A known node, live or not."""
        return self._nodes.get(node_id)

    def owner(self, shard_id: str) -> str | None:
        """The node that advertises a shard."""
        return self._owners.get(shard_id)

    def silent(self) -> Iterator[Node]:
        """Nodes whose lease has run out, and of which nobody has taken note yet."""
        good_from_s = self._good_from_s()
        for node_id in self._by_report:
            node = self._nodes[node_id]
            if node.reported_s > good_from_s:
                return
            yield node

    def live(self) -> Iterator[Node]:
        """Nodes whose lease is good now, in no order. Cheap: nothing is copied."""
        good_from_s = self._good_from_s()
        return (node for node in self._nodes.values() if node.state == LIVE and node.reported_s > good_from_s)

    def advertised(self) -> tuple[ShardAdvertisement, ...]:
        """Shards of nodes whose lease is good now, ready or not."""
        return tuple(shard for node in self.nodes() if node.state == LIVE for shard in node.shards.values())

    def ready(self) -> tuple[ShardAdvertisement, ...]:
        """Those that sessions may use."""
        return tuple(shard for shard in self.advertised() if self.is_ready(shard.shard.shard_id))

    def models(self) -> tuple[KnownModel, ...]:
        """Artifacts ever advertised, by name and digest."""
        return tuple(model for _, model in sorted(self._models.items()))

    def _changes_of(self, node_id: str) -> asyncio.Lock:
        return self._changing.setdefault(node_id, asyncio.Lock())

    def _good_from_s(self) -> float:
        """Reports later than this keep a lease."""
        return self.now_s() - self._settings.lease_ttl_s

    def _is_late(self, node: Node) -> bool:
        return node.state == LIVE and not self._in_time(node)

    def _in_time(self, node: Node) -> bool:
        return node.reported_s > self._good_from_s()

    def _renew(self, node: Node) -> None:
        node.last_seen_unix_s = self._wall_clock()
        node.reported_s = self.now_s()
        self._by_report.pop(node.node_id, None)
        self._by_report[node.node_id] = None
        self.reported(node)

    def _leased(self, node_id: str, lease_epoch: int, instance: str) -> Node:
        node = self._nodes.get(node_id)
        if node is None:
            raise LeaseLost(f"node {node_id} is not registered here; register again", superseded=False)
        if node.instance != instance:
            raise LeaseLost(
                f"node {node_id} was registered again by another process (lease epoch {node.lease_epoch}, "
                f"not {lease_epoch}); give each process its own state directory",
                superseded=True,
            )
        if node.lease_epoch != lease_epoch or node.state != LIVE or not self._in_time(node):
            raise LeaseLost(f"lease epoch {lease_epoch} of node {node_id} has ended; register again", superseded=False)
        return node

    def _judge(
        self, node: Node, advertised: Iterable[ShardAdvertisement]
    ) -> tuple[dict[str, ShardAdvertisement], dict[str, RefusedShard]]:
        offered: dict[str, ShardAdvertisement] = {}
        refused: dict[str, RefusedShard] = {}
        for one in advertised:
            shard = one.shard
            known = node.shards.get(shard.shard_id)
            reason = None
            if known is not None and known.shard == shard:
                # It was judged before. And it stays the same object: others remember by it what they found out.
                one = one.model_copy(update={"shard": known.shard})
            else:
                reason = implausible(node.node_id, shard)
            reason = reason or self._taken(node, shard)
            if reason is None:
                offered[shard.shard_id] = one
            else:
                refused[shard.shard_id] = RefusedShard(one, reason)
        return offered, refused

    def _taken(self, node: Node, shard: Shard) -> str | None:
        owner = self._owners.get(shard.shard_id, node.node_id)
        if owner != node.node_id:
            return f"it belongs to node {owner}"
        other = self._nodes.get(self._at.get(shard.address, ""))
        if other is None or other is node or other.state != LIVE or not self._in_time(other):
            return None
        return f"address {shard.address} is that of a shard of node {other.node_id}"

    def _not_ready(self, node: Node) -> dict[str, str]:
        told = {shard_id: f"refused: {refused.reason}" for shard_id, refused in node.refused.items()}
        for shard_id in node.shards:
            reason = self._readiness.why_not(shard_id)
            if reason is not None:
                told[shard_id] = reason
        return told

    def _neighbours_of(self, node: Node) -> tuple[Neighbour, ...]:
        looked_s, found = self._neighbours.get(node.node_id, (float("-inf"), ()))
        now_s = self.now_s()
        if now_s < looked_s + NEIGHBOURS_S and len(self._owners) > FEW_SHARDS:
            return found
        found = self._neighbourhoods.of(node.node_id, (one.shard for one in node.shards.values()))
        self._neighbours[node.node_id] = (now_s, found)
        return found

    def _replace_shards(self, node: Node, shards: dict[str, ShardAdvertisement]) -> None:
        gone, new = node.shards.keys() - shards.keys(), shards.keys() - node.shards.keys()
        for shard_id in gone:
            del self._owners[shard_id]
            self._neighbourhoods.remove(node.shards[shard_id].shard)
            self._forget_address(node, node.shards[shard_id].shard.address)
            log.info("shard %s withdrawn", shard_id)
        for shard_id, one in shards.items():
            before = node.shards.get(shard_id)
            if before is None or before.shard is not one.shard:
                if before is not None:
                    self._neighbourhoods.remove(before.shard)
                    self._forget_address(node, before.shard.address)
                self._neighbourhoods.add(node.node_id, one.shard)
                self.changed.set()
            self._at[one.shard.address] = node.node_id
        for shard_id in new:
            self._owners[shard_id] = node.node_id
            log.info("shard %s advertised at %s", shard_id, shards[shard_id].shard.address)
        node.shards = shards
        self._readiness.forget(gone)
        if gone:
            self.changed.set()

    def _forget_address(self, node: Node, address: str) -> None:
        if self._at.get(address) == node.node_id:
            del self._at[address]

    async def _set_proven(self, shard_ids: Collection[str], *, proven: bool, reason: str = "") -> None:
        async with AsyncExitStack() as changes:
            # Always in the same order, so that two of these never wait for each other.
            for node_id in sorted({self._owners[shard_id] for shard_id in shard_ids if shard_id in self._owners}):
                await changes.enter_async_context(self._changes_of(node_id))
            there = [shard_id for shard_id in shard_ids if shard_id in self._owners]
            changing = [shard_id for shard_id in there if self._readiness.is_proven(shard_id) != proven]
            if changing:
                await self._writer.run(lambda connection: write_proven(connection, changing, proven=proven))
            if proven:
                self._readiness.prove(there)
            else:
                self._readiness.doubt(there, reason)

    async def _end(self, node: Node, state: str) -> None:
        await self._store(replace(node, state=state, shards={}))
        node.state = state
        node.refused, node.activities, node.links, node.capacity = {}, (), (), None
        self._by_report.pop(node.node_id, None)
        self._neighbours.pop(node.node_id, None)
        self._replace_shards(node, {})
        self.reported(node)

    async def _store(self, node: Node) -> None:
        """Make the node's rows equal to ``node``, and add models not seen before."""
        models = new_models(node, self._models.keys())
        proven = {shard_id for shard_id in node.shards if self._readiness.is_proven(shard_id)}
        await self._writer.run(lambda connection: write_node(connection, node, proven, models))
        for model in models:
            self._models.setdefault((model.model, model.artifact_digest), model)
