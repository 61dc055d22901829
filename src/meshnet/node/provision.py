"""Gets a node the artifact that it is to serve: manifest from the tracker, bytes from the swarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from meshnet.artifact.library import Library
from meshnet.artifact.provider import Provider, ProviderState
from meshnet.artifact.stored import StoredArtifact
from meshnet.engines.native import WorkerOptions
from meshnet.errors import TrackerUnavailable, UnknownArtifact
from meshnet.node.model import ProvidedModel, needed_pieces
from meshnet.tracker.client import TrackerClient

log = logging.getLogger(__name__)

_RETRY_S = 2.0


async def find_artifact(client: TrackerClient, library: Library, wanted: str) -> StoredArtifact:
    """The artifact that ``wanted`` names, by the tracker's word; the store's own is used while no tracker answers.

    Raises:
        UnknownArtifact: neither has it.
        ArtifactError: several fit, or what the tracker sent is not what it should be.
    """
    trouble = ""
    while True:
        try:
            return library.add(await client.artifact(wanted))
        except UnknownArtifact:
            stored = library.find(wanted)
            if stored is None:
                raise
            return stored
        except TrackerUnavailable as error:
            stored = library.find(wanted)
            if stored is not None:
                log.warning("%s; using the manifest of %s that is in the store", error, stored.digest)
                return stored
            if str(error) != trouble:
                log.warning("%s; trying again for its manifest", error)
            trouble = str(error)
        await asyncio.sleep(_RETRY_S)


async def provide_ranges(
    provider: Provider,
    binary: Path,
    options: Sequence[WorkerOptions],
    on_progress: Callable[[ProviderState], None],
) -> list[tuple[WorkerOptions, ProvidedModel]]:
    """Fetch the headers, ask the engine what each range reads, and have it fetched; returns when that has begun.

    The options come back with the model's path in the store. ``provider`` must be running.

    Raises:
        WorkerError: the engine refuses a range.
        ArtifactError, StoreError: the headers cannot be had, or the rest does not fit.
    """
    stored = provider.stored
    pieces = stored.bundle.pieces
    provider.want(pieces.covering(stored.bundle.artifact.headers()))
    await until_complete(provider, on_progress)
    placed = [replace(one, model=str(stored.paths[0])) for one in options]
    needed = [await needed_pieces(binary, one, stored) for one in placed]
    provider.want(frozenset().union(*needed))
    whole = stored.bundle.artifact.whole
    return [
        (one, ProvidedModel(provider, range_pieces, one.layers or whole))
        for one, range_pieces in zip(placed, needed, strict=True)
    ]


async def until_complete(provider: Provider, on_progress: Callable[[ProviderState], None]) -> None:
    """Call ``on_progress`` with news until all that is wanted is there, and once then. Raises as ``changed``."""
    while not provider.is_complete():
        on_progress(await provider.changed())
    on_progress(provider.state)
