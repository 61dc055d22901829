"""One tracker: database, registry, sessions and artifacts together, with expiry running in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from meshnet.core import LayerRange, Shard
from meshnet.errors import TrackerUnavailable
from meshnet.planner.routing import covers, gaps, why_no_route
from meshnet.tracker.artifacts import Artifacts, short_hashes
from meshnet.tracker.clock import ListeningClock
from meshnet.tracker.database import Database
from meshnet.tracker.messages import (
    VERSION,
    ModelCoverage,
    NodeStatus,
    PublishedArtifact,
    PublishedArtifacts,
    ShardStatus,
    TrackerStatus,
)
from meshnet.tracker.peers import Peers
from meshnet.tracker.registry import Node, Registry
from meshnet.tracker.sessions import Sessions
from meshnet.tracker.settings import TrackerSettings

log = logging.getLogger(__name__)


class Tracker:
    """Made by `open`, which also starts and ends expiry."""

    def __init__(self, database: Database, settings: TrackerSettings) -> None:
        self.settings = settings
        self.database = database
        # Expiry reads the clock at every turn.
        clock = ListeningClock(2 * settings.sweep_s)
        self.registry = Registry(database, settings, clock=clock)
        self.sessions = Sessions(database, self.registry, settings)
        self.artifacts = Artifacts(database)
        self.peers = Peers(settings.peer_ttl_s, clock=clock)

    @classmethod
    @asynccontextmanager
    async def open(cls, database_url: str, settings: TrackerSettings | None = None) -> AsyncIterator[Tracker]:
        """A running tracker on this database.

        Raises:
            UsageError: the database cannot be used.
        """
        database = await Database.open(database_url)
        try:
            tracker = cls(database, settings or TrackerSettings())
            await tracker.registry.restore()
            await tracker.sessions.restore()
            await tracker.artifacts.restore()
            sweeping = asyncio.create_task(tracker._sweep(), name="tracker expiry")
            try:
                yield tracker
            finally:
                sweeping.cancel()
                with suppress(asyncio.CancelledError):
                    await sweeping
                await tracker.sessions.finish()
        finally:
            await database.close()

    async def status(self) -> TrackerStatus:
        """Everything there is to see, without any secret."""
        return TrackerStatus(
            version=VERSION,
            nodes=tuple(self._node_status(node) for node in self.registry.nodes()),
            models=self._coverage(),
            open_sessions=self.sessions.n_open,
            closed_sessions=await self.sessions.count_closed(),
        )

    def published(self) -> PublishedArtifacts:
        """Everything published, with its peers now."""
        return PublishedArtifacts(artifacts=tuple(self._with_peers(artifact) for artifact in self.artifacts.all()))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.sweep_s)
            self.peers.expire()
            await self.database.check()
            try:
                await self.registry.expire()
                await self.sessions.expire()
            except TrackerUnavailable as error:
                # A full disk must not end expiry for good; it is tried again at the next turn.
                log.error("expiry failed, trying again in %g s: %s", self.settings.sweep_s, error)

    def _with_peers(self, artifact: PublishedArtifact) -> PublishedArtifact:
        counts = [self.peers.count(short_hash) for short_hash in short_hashes(artifact)]
        return artifact.model_copy(
            update={
                "peers": sum(count.peers for count in counts),
                "complete_peers": sum(count.complete for count in counts),
            }
        )

    def _node_status(self, node: Node) -> NodeStatus:
        return NodeStatus(
            node_id=node.node_id,
            state=node.state,
            lease_epoch=node.lease_epoch,
            version=node.version,
            last_seen_unix_s=node.last_seen_unix_s,
            shards=tuple(
                ShardStatus(
                    shard_id=shard_id,
                    address=advertised.shard.address,
                    model=advertised.shard.model,
                    artifact_digest=advertised.shard.artifact_digest,
                    layers=advertised.shard.layers,
                    n_layer=advertised.shard.n_layer,
                    engine=advertised.shard.engine,
                    build_id=advertised.shard.build_id,
                    session_slots=advertised.shard.session_slots,
                    session_capacity_tokens=advertised.shard.session_capacity_tokens,
                    open_sessions=self.sessions.open_on(shard_id),
                    load=advertised.load,
                )
                for shard_id, advertised in sorted(node.shards.items())
            ),
        )

    def _coverage(self) -> tuple[ModelCoverage, ...]:
        ready = [advertised.shard for advertised in self.registry.advertised() if not advertised.load.draining]
        told = []
        for known in self.registry.models():
            shards = [shard for shard in ready if _serves(shard, known.model, known.artifact_digest)]
            routable = covers(shards)
            told.append(
                ModelCoverage(
                    model=known.model,
                    artifact_digest=known.artifact_digest,
                    n_layer=known.n_layer,
                    routable=routable,
                    reason=None if routable else why_no_route(shards),
                    gaps=gaps(known.n_layer, _ranges(shards)),
                )
            )
        return tuple(told)


def _serves(shard: Shard, model: str, artifact_digest: str) -> bool:
    return shard.model == model and shard.artifact_digest == artifact_digest


def _ranges(shards: list[Shard]) -> list[LayerRange]:
    return [shard.layers for shard in shards]
