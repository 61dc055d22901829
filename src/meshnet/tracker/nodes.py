"""What the tracker holds of a node and of a model, and how both are kept in the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import ValidationError
from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from meshnet.core import Shard
from meshnet.tracker.database import ModelRow, NodeRow, ShardRow
from meshnet.tracker.messages import Activity, LinkMeasure, NodeCapacity, ShardAdvertisement

log = logging.getLogger(__name__)

LIVE, LOST, LEFT = "live", "lost", "left"

_NODE_COLUMNS = ("lease_epoch", "instance", "version", "state", "last_seen_unix_s", "public_key", "machine")


@dataclass(frozen=True)
class KnownModel:
    """An artifact that was advertised at least once."""

    model: str
    artifact_digest: str
    architecture: str
    n_layer: int
    first_seen_unix_s: int


@dataclass(frozen=True)
class RefusedShard:
    """An advertisement that cannot be right, and why. It is shown, and never used."""

    advertised: ShardAdvertisement
    reason: str


@dataclass
class Node:
    """One known node. ``reported_s`` is its last report on the registry's clock; a live lease runs from it.

    ``public_key`` and ``machine`` are None for a node that has not registered since nodes have keys. What stands below
    the shards is the last heartbeat's, and nothing is known of it until there was one.
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
    refused: dict[str, RefusedShard] = field(default_factory=dict)
    capacity: NodeCapacity | None = None
    links: tuple[LinkMeasure, ...] = ()
    activities: tuple[Activity, ...] = ()


@dataclass(frozen=True)
class Kept:
    """Everything of the registry that outlives a restart. ``proven`` are shard ids."""

    nodes: dict[str, Node]
    models: list[KnownModel]
    proven: set[str]


async def read_kept(session: AsyncSession, *, reported_s: float) -> Kept:
    """Read what an earlier run left; nodes count as heard of at ``reported_s``."""
    nodes = {
        row.node_id: Node(
            node_id=row.node_id,
            lease_epoch=row.lease_epoch,
            instance=row.instance,
            version=row.version,
            state=row.state,
            last_seen_unix_s=row.last_seen_unix_s,
            reported_s=reported_s,
            public_key=row.public_key,
            machine=row.machine,
        )
        for row in await session.scalars(select(NodeRow))
    }
    proven: set[str] = set()
    for shard_row in await session.scalars(select(ShardRow)):
        try:
            shard = Shard.model_validate(shard_row.shard)
        except ValidationError:
            # Another version wrote it. Its node advertises it again with its next heartbeat.
            log.warning("forgetting shard %s, which this version cannot read", shard_row.shard_id)
            continue
        advertised = ShardAdvertisement(shard=shard, worker_key=shard_row.worker_key)
        nodes[shard_row.node_id].shards[shard.shard_id] = advertised
        if shard_row.proven:
            proven.add(shard.shard_id)
    return Kept(nodes, [known_model(row) for row in await session.scalars(select(ModelRow))], proven)


def write_node(connection: Connection, node: Node, proven: Collection[str], models: Sequence[KnownModel]) -> None:
    """Make the node's rows equal to ``node``, and add ``models`` that are not there. ``proven`` are shard ids."""
    values = {name: getattr(node, name) for name in _NODE_COLUMNS}
    of_node = NodeRow.node_id == node.node_id
    if not connection.execute(update(NodeRow).where(of_node).values(values)).rowcount:
        connection.execute(insert(NodeRow).values(node_id=node.node_id, **values))
    connection.execute(delete(ShardRow).where(ShardRow.node_id == node.node_id))
    shards = [
        {
            "shard_id": shard_id,
            "node_id": node.node_id,
            "shard": one.shard.model_dump(mode="json"),
            "worker_key": one.worker_key,
            "proven": shard_id in proven,
        }
        for shard_id, one in node.shards.items()
    ]
    if shards:
        connection.execute(insert(ShardRow), shards)
    for model in models:
        # Another node may have offered it first at the same moment.
        this = (ModelRow.model == model.model) & (ModelRow.artifact_digest == model.artifact_digest)
        if connection.execute(select(ModelRow.model).where(this)).one_or_none() is None:
            connection.execute(insert(ModelRow), asdict(model))


def write_proven(connection: Connection, shard_ids: Collection[str], *, proven: bool) -> None:
    connection.execute(update(ShardRow).where(ShardRow.shard_id.in_(shard_ids)).values(proven=proven))


def new_models(node: Node, known: Collection[tuple[str, str]]) -> list[KnownModel]:
    """The models of this node's shards that are not in ``known`` (name and digest)."""
    models = {
        (shard.model, shard.artifact_digest): KnownModel(
            model=shard.model,
            artifact_digest=shard.artifact_digest,
            architecture=shard.architecture,
            n_layer=shard.n_layer,
            first_seen_unix_s=int(time.time()),
        )
        for shard in (advertised.shard for advertised in node.shards.values())
        if (shard.model, shard.artifact_digest) not in known
    }
    return list(models.values())


def known_model(row: ModelRow) -> KnownModel:
    return KnownModel(
        model=row.model,
        artifact_digest=row.artifact_digest,
        architecture=row.architecture,
        n_layer=row.n_layer,
        first_seen_unix_s=row.first_seen_unix_s,
    )


def differs(before: ShardAdvertisement | None, now: ShardAdvertisement) -> bool:
    """Whether a shard is another one than it was under the same id."""
    return before is not None and (before.shard, before.worker_key) != (now.shard, now.worker_key)


def substance(shards: dict[str, ShardAdvertisement]) -> dict[str, tuple[Shard, str]]:
    """What is kept of the advertisements: all but load and times."""
    return {shard_id: (one.shard, one.worker_key) for shard_id, one in shards.items()}
