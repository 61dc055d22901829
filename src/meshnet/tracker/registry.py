"""Who is there and what they offer: leases, heartbeats, advertised shards, models ever seen.

Memory is the working state; the database gets every change of membership, lease or offer (not every heartbeat), so a
restarted tracker knows its nodes again and gives each a fresh lease period to report.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pydantic import ValidationError
from sqlalchemy import delete, select

from meshnet.core import Shard
from meshnet.errors import IdentityRefused, LeaseLost, RequestError
from meshnet.tracker.database import Database, ModelRow, NodeRow, ShardRow
from meshnet.tracker.identity import Challenges
from meshnet.tracker.messages import Challenge, Departure, Heartbeat, Lease, Registration, ShardAdvertisement
from meshnet.tracker.settings import TrackerSettings

log = logging.getLogger(__name__)

LIVE, LOST, LEFT = "live", "lost", "left"


@dataclass(frozen=True)
class KnownModel:
    """An artifact that was advertised at least once."""

    model: str
    artifact_digest: str
    architecture: str
    n_layer: int
    first_seen_unix_s: int


@dataclass
class Node:
    """One known node. ``reported_s`` is its last report on the registry's clock; a live lease runs from it.

    ``public_key`` and ``machine`` are None for a node that has not registered since nodes have keys.
    """

    node_id: str
    lease_epoch: int
    instance: str
    version: str
    state: str
    last_seen_unix_s: float
    reported_s: float
    public_key: str | None = None
    machine: str | None = None
    shards: dict[str, ShardAdvertisement] = field(default_factory=dict)


class Registry:
    """All nodes of one tracker. ``clock`` gives seconds that never jump; leases are measured on it."""

    def __init__(
        self, database: Database, settings: TrackerSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._nodes: dict[str, Node] = {}
        self._models: dict[tuple[str, str], KnownModel] = {}
        self._challenges = Challenges(self.now_s)
        # Held over each change of a node, so that memory and database change in the same order.
        self._changing = asyncio.Lock()

    async def restore(self) -> None:
        """Read what an earlier run left. Live nodes get a whole lease period from now."""
        now_s = self.now_s()
        async with self._database.reading() as session:
            for row in await session.scalars(select(NodeRow)):
                self._nodes[row.node_id] = Node(
                    node_id=row.node_id,
                    lease_epoch=row.lease_epoch,
                    instance=row.instance,
                    version=row.version,
                    state=row.state,
                    last_seen_unix_s=row.last_seen_unix_s,
                    reported_s=now_s,
                    public_key=row.public_key,
                    machine=row.machine,
                )
            for shard_row in await session.scalars(select(ShardRow)):
                try:
                    shard = Shard.model_validate(shard_row.shard)
                except ValidationError:
                    # Another version wrote it. Its node advertises it again with its next heartbeat.
                    log.warning("forgetting shard %s, which this version cannot read", shard_row.shard_id)
                    continue
                self._nodes[shard_row.node_id].shards[shard.shard_id] = ShardAdvertisement(
                    shard=shard, worker_key=shard_row.worker_key
                )
            for model_row in await session.scalars(select(ModelRow)):
                self._remember(_known(model_row))

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
        async with self._changing:
            known = self._nodes.get(node_id)
            if known is not None:
                self._check_identity(known, registration)
            node = Node(
                node_id=node_id,
                lease_epoch=known.lease_epoch + 1 if known else 1,
                instance=registration.instance,
                version=registration.version,
                state=LIVE,
                last_seen_unix_s=time.time(),
                reported_s=self.now_s(),
                public_key=registration.public_key,
                machine=registration.machine,
            )
            await self._store(node)
            self._nodes[node_id] = node
        log.info("node %s registered, lease epoch %d", node_id, node.lease_epoch)
        return Lease(
            lease_epoch=node.lease_epoch,
            heartbeat_ms=round(self._settings.heartbeat_s * 1000),
            ttl_ms=round(self._settings.lease_ttl_s * 1000),
        )

    async def heartbeat(self, node_id: str, beat: Heartbeat) -> None:
        """Renew a lease and replace what the node advertises.

        Raises:
            LeaseLost: the lease is unknown, has run out, or was taken over.
            RequestError: a shard id belongs to another live node.
        """
        async with self._changing:
            node = self._leased(node_id, beat.lease_epoch, beat.instance)
            offered = {advertised.shard.shard_id: advertised for advertised in beat.shards}
            self._refuse_foreign(node, offered)
            changed = {key: (a.shard, a.worker_key) for key, a in node.shards.items()} != {
                key: (a.shard, a.worker_key) for key, a in offered.items()
            }
            if changed:
                await self._store(replace(node, shards=offered))
                for shard_id in sorted(offered.keys() - node.shards.keys()):
                    log.info("shard %s advertised at %s", shard_id, offered[shard_id].shard.address)
                for shard_id in sorted(node.shards.keys() - offered.keys()):
                    log.info("shard %s withdrawn", shard_id)
            node.shards = offered
            node.last_seen_unix_s = time.time()
            node.reported_s = self.now_s()

    async def deregister(self, node_id: str, departure: Departure) -> None:
        """End a lease at the node's own wish.

        Raises:
            LeaseLost: the lease is unknown, has run out, or was taken over.
        """
        async with self._changing:
            node = self._leased(node_id, departure.lease_epoch, departure.instance)
            await self._end(node, LEFT)
        log.info("node %s left", node_id)

    async def expire(self) -> tuple[str, ...]:
        """Mark nodes whose lease has run out as lost, and return their ids."""
        async with self._changing:
            late = [node for node in self._nodes.values() if node.state == LIVE and not self._in_time(node)]
            for node in late:
                await self._end(node, LOST)
                log.warning("node %s lost: no heartbeat for %g s", node.node_id, self._settings.lease_ttl_s)
        return tuple(node.node_id for node in late)

    def now_s(self) -> float:
        """The registry's clock: seconds that never jump, from an unknown start."""
        return self._clock()

    def nodes(self) -> tuple[Node, ...]:
        """All known nodes by id. A node whose lease has just run out is told as lost even before `expire` ran."""
        return tuple(
            node if node.state != LIVE or self._in_time(node) else replace(node, state=LOST, shards={})
            for _, node in sorted(self._nodes.items())
        )

    def advertised(self) -> tuple[ShardAdvertisement, ...]:
        """Shards of nodes whose lease is good now."""
        return tuple(shard for node in self.nodes() if node.state == LIVE for shard in node.shards.values())

    def models(self) -> tuple[KnownModel, ...]:
        """Artifacts ever advertised, by name and digest."""
        return tuple(model for _, model in sorted(self._models.items()))

    def _check_identity(self, known: Node, registration: Registration) -> None:
        if known.public_key not in (None, registration.public_key):
            raise IdentityRefused(
                f"node {known.node_id} is known here with another key; restore its node.key, or delete node.json in "
                "the state directory to become a new node"
            )
        live = known.state == LIVE and self._in_time(known)
        if live and known.machine not in (None, registration.machine):
            silent_s = self.now_s() - known.reported_s
            raise IdentityRefused(
                f"node {known.node_id} is running elsewhere (last seen {silent_s:.1f} s ago): its identity was copied, "
                "or has moved here while it still runs there. Stop it there and start this one "
                f"{self._settings.lease_ttl_s:g} s later, or give this one a --state-dir of its own"
            )

    def _in_time(self, node: Node) -> bool:
        return self.now_s() < node.reported_s + self._settings.lease_ttl_s

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

    def _refuse_foreign(self, node: Node, shard_ids: Iterable[str]) -> None:
        for other in self._nodes.values():
            taken = other.shards.keys() & set(shard_ids)
            if taken and other.node_id != node.node_id:
                raise RequestError(f"shard {min(taken)} belongs to node {other.node_id}", param="shards")

    def _remember(self, model: KnownModel) -> None:
        self._models[model.model, model.artifact_digest] = model

    async def _end(self, node: Node, state: str) -> None:
        await self._store(replace(node, state=state, shards={}))
        node.state = state
        node.shards = {}

    async def _store(self, node: Node) -> None:
        """Make the node's rows equal to ``node``, and add models not seen before."""
        new_models = {
            (shard.model, shard.artifact_digest): ModelRow(
                model=shard.model,
                artifact_digest=shard.artifact_digest,
                architecture=shard.architecture,
                n_layer=shard.n_layer,
                first_seen_unix_s=int(time.time()),
            )
            for shard in (advertised.shard for advertised in node.shards.values())
            if (shard.model, shard.artifact_digest) not in self._models
        }
        async with self._database.writing() as session:
            await session.merge(
                NodeRow(
                    node_id=node.node_id,
                    lease_epoch=node.lease_epoch,
                    instance=node.instance,
                    version=node.version,
                    state=node.state,
                    last_seen_unix_s=node.last_seen_unix_s,
                    public_key=node.public_key,
                    machine=node.machine,
                )
            )
            await session.execute(delete(ShardRow).where(ShardRow.node_id == node.node_id))
            session.add_all(
                ShardRow(
                    shard_id=advertised.shard.shard_id,
                    node_id=node.node_id,
                    shard=advertised.shard.model_dump(mode="json"),
                    worker_key=advertised.worker_key,
                    proven=False,
                )
                for advertised in node.shards.values()
            )
            session.add_all(new_models.values())
        for row in new_models.values():
            self._remember(_known(row))


def _known(row: ModelRow) -> KnownModel:
    return KnownModel(
        model=row.model,
        artifact_digest=row.artifact_digest,
        architecture=row.architecture,
        n_layer=row.n_layer,
        first_seen_unix_s=row.first_seen_unix_s,
    )
