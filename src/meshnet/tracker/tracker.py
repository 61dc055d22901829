"""One tracker: database, registry, sessions and artifacts together; expiry, probes and placement run beside them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from meshnet.errors import TrackerUnavailable
from meshnet.tracker.artifacts import Artifacts, short_hashes
from meshnet.tracker.clock import ListeningClock
from meshnet.tracker.database import Database
from meshnet.tracker.messages import (
    VERSION,
    PublishedArtifact,
    PublishedArtifacts,
    TrackerStatus,
)
from meshnet.tracker.overview import coverage, node_status
from meshnet.tracker.peers import Peers
from meshnet.tracker.placements import Placements
from meshnet.tracker.probes import Prober
from meshnet.tracker.recipes import Recipe
from meshnet.tracker.registry import Registry
from meshnet.tracker.sessions import Sessions
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.standings import Standings

log = logging.getLogger(__name__)


class Tracker:
    """Made by `open`, which also starts and ends what runs beside it."""

    def __init__(self, database: Database, settings: TrackerSettings, recipes: Sequence[Recipe] = ()) -> None:
        self.settings = settings
        self.database = database
        # Expiry reads the clock at every turn.
        clock = ListeningClock(2 * settings.sweep_s)
        self.registry = Registry(database, settings, clock=clock, probing=settings.probing)
        self.standings = Standings(database)
        self.sessions = Sessions(database, self.registry, settings)
        self.artifacts = Artifacts(database)
        self.peers = Peers(settings.peer_ttl_s, clock=clock)
        self.placements = Placements(self.registry, self.artifacts, settings, recipes, open_on=self.sessions.open_on)
        self.registry.assignments = self.placements.assignments
        self.sessions.unrepairable = self.placements.lost

    @classmethod
    @asynccontextmanager
    async def open(
        cls, database_url: str, settings: TrackerSettings | None = None, recipes: Sequence[Recipe] = ()
    ) -> AsyncIterator[Tracker]:
        """A running tracker on this database. ``recipes``: what nodes that lend capacity are to serve; by default
        everything that is published.

        Raises:
            UsageError: the database cannot be used.
        """
        database = await Database.open(database_url)
        try:
            tracker = cls(database, settings or TrackerSettings(), recipes)
            await tracker.registry.restore()
            await tracker.sessions.restore()
            await tracker.artifacts.restore()
            await tracker.standings.restore()
            working = [
                asyncio.create_task(tracker._sweep(), name="tracker expiry"),
                asyncio.create_task(tracker.placements.run(), name="placement"),
            ]
            if tracker.settings.probing:
                prober = Prober(tracker.registry, tracker.standings, tracker.settings)
                working.append(asyncio.create_task(prober.run(), name="probes"))
            try:
                yield tracker
            finally:
                for task in working:
                    task.cancel()
                await asyncio.gather(*working, return_exceptions=True)
                await tracker.registry.finish()
                await tracker.sessions.finish()
        finally:
            await database.close()

    async def status(self) -> TrackerStatus:
        """Everything there is to see, without any secret."""
        return TrackerStatus(
            version=VERSION,
            nodes=tuple(node_status(self.registry, node, self.sessions.open_on) for node in self.registry.nodes()),
            models=coverage(self.registry),
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
