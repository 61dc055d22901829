"""Published artifacts: their manifests and torrents by digest, and which swarms there may be.

The database holds them; memory has all but the manifests and torrents. Whoever knows the join token may publish, and
every node checks what it gets against the digest that it asked for, so a publication is only ever believed as far as
its names and web seeds go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import load_only

from meshnet.artifact.bundle import Bundle
from meshnet.errors import UnknownArtifact
from meshnet.tracker.database import ArtifactRow, Database
from meshnet.tracker.messages import MAX_EARLIER_SWARMS, PublishedArtifact
from meshnet.tracker.publication import Publication, choose

log = logging.getLogger(__name__)

#: BitTorrent's trackers know a v2 swarm by so many bytes of its hash.
SHORT_HASH_BYTES = 20


class Artifacts:
    """All publications of one tracker. ``clock`` gives Unix time in seconds."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._published: dict[str, PublishedArtifact] = {}
        self._swarms: frozenset[bytes] = frozenset()
        # Held over each change, so that memory and database change in the same order.
        self._changing = asyncio.Lock()

    async def restore(self) -> None:
        """Read what was published in earlier runs."""
        columns = [getattr(ArtifactRow, name) for name in ArtifactRow.SUMMARY]
        async with self._database.reading() as session:
            for row in await session.scalars(select(ArtifactRow).options(load_only(*columns))):
                try:
                    published = PublishedArtifact.model_validate(row, from_attributes=True)
                except ValidationError:
                    log.warning("leaving out artifact %s, which this version cannot read", row.digest)
                    continue
                self._published[published.digest] = published
        self._index()

    async def publish(self, bundle: Bundle) -> PublishedArtifact:
        """Keep an artifact, in place of an earlier publication of the same digest.

        Other file names make another swarm. The earlier one stays open to those who are in it.

        Raises:
            TrackerUnavailable: the database failed.
        """
        # Megabytes are written and hashed here.
        publication, digest, info_hash = await asyncio.to_thread(
            lambda: (Publication.of(bundle), bundle.digest, bundle.info_hash)
        )
        artifact = bundle.artifact
        async with self._changing:
            before = self._published.get(digest)
            published = PublishedArtifact(
                digest=digest,
                name=bundle.manifest.name,
                architecture=artifact.architecture,
                n_layer=artifact.n_layer,
                size_bytes=artifact.size_bytes,
                n_files=len(artifact.files),
                info_hash=info_hash,
                earlier_info_hashes=_earlier(before, info_hash),
                published_unix_s=int(self._clock()),
            )
            row = ArtifactRow(manifest=publication.manifest, torrent=publication.torrent, **_summary(published))
            async with self._database.writing() as session:
                await session.merge(row)
            self._published[digest] = published
            self._index()
        log.info("artifact %s published: %s", published.name, digest)
        if before is not None and before.info_hash != info_hash:
            log.warning("artifact %s has other file names than before: nodes meet in a new swarm", digest)
        return published

    def all(self) -> tuple[PublishedArtifact, ...]:
        """Every publication, by name and digest."""
        return tuple(sorted(self._published.values(), key=lambda published: (published.name, published.digest)))

    async def get(self, wanted: str) -> Publication:
        """By digest, its first 8 digits or more, or name.

        Raises:
            UnknownArtifact: none fits.
            ArtifactError: several fit.
            TrackerUnavailable: the database failed.
        """
        digest = choose(wanted, self.all()).digest
        async with self._database.reading() as session:
            row = await session.get(ArtifactRow, digest)
        if row is None:
            raise UnknownArtifact(
                f"artifact {digest} is gone from the tracker's database; publish it again (`meshnet artifact publish`)",
                param="artifact",
            )
        return Publication(row.manifest, row.torrent)

    def has_swarm(self, short_hash: bytes) -> bool:
        """Whether an info hash, cut to ``SHORT_HASH_BYTES``, is that of something published."""
        return short_hash in self._swarms

    def _index(self) -> None:
        self._swarms = frozenset(
            short_hash for published in self._published.values() for short_hash in short_hashes(published)
        )


def short_hashes(published: PublishedArtifact) -> tuple[bytes, ...]:
    """The artifact's swarms as trackers know them, that of the last publication first."""
    return tuple(
        bytes.fromhex(info_hash)[:SHORT_HASH_BYTES]
        for info_hash in (published.info_hash, *published.earlier_info_hashes)
    )


def _earlier(before: PublishedArtifact | None, info_hash: str) -> tuple[str, ...]:
    if before is None:
        return ()
    known = (before.info_hash, *before.earlier_info_hashes)
    return tuple(earlier for earlier in known if earlier != info_hash)[:MAX_EARLIER_SWARMS]


def _summary(published: PublishedArtifact) -> dict[str, Any]:
    return published.model_dump(mode="json", include=set(ArtifactRow.SUMMARY))
