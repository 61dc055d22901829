"""The artifacts that one process fetches and serves: one provider for each, as long as a range uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from meshnet.artifact.library import Library
from meshnet.artifact.provider import Provider, ProviderState
from meshnet.artifact.stored import StoredArtifact
from meshnet.artifact.swarm import SwarmOptions
from meshnet.engines.native import WorkerOptions
from meshnet.errors import MeshnetError
from meshnet.node.address import WILDCARDS, Endpoint, free_port
from meshnet.node.assigned import Prepared
from meshnet.node.model import ProvidedModel, needed_pieces
from meshnet.node.provision import find_artifact
from meshnet.node.worker import WorkerPlan
from meshnet.tracker.client import TrackerClient
from meshnet.tracker.messages import Assignment

log = logging.getLogger(__name__)


class Provided:
    """One artifact in use: its running provider, and what each user wants of it."""

    def __init__(self, provider: Provider, on_progress: Callable[[ProviderState], None]) -> None:
        self.provider = provider
        self.n_users = 0
        self._wants: dict[object, frozenset[int]] = {}
        self._running = asyncio.create_task(provider.run(), name="provider")
        self._telling = asyncio.create_task(self._tell(on_progress), name="provider progress")

    @property
    def is_running(self) -> bool:
        return not self._running.done()

    def want(self, user: object, pieces: Iterable[int]) -> None:
        """Fetch and keep these for ``user``, beside what others want.

        Raises:
            StoreError: they do not fit on the disk or into the quota; what was wanted before still is.
        """
        wants = {**self._wants, user: frozenset(pieces)}
        self.provider.want(frozenset().union(*wants.values()))
        self._wants = wants

    async def range(
        self, user: object, binary: Path, options: WorkerOptions, *, wished_s: float
    ) -> tuple[WorkerOptions, ProvidedModel]:
        """Have fetched what a worker with ``options`` reads; returns when that has begun and the headers are there.

        The options come back with the model's path in the store.

        Raises:
            RangeRefused: the engine cannot cut the range out.
            WorkerError: it cannot read the headers.
            ArtifactError, StoreError: the bytes cannot be had or do not fit.
        """
        stored = self.provider.stored
        headers = frozenset(stored.bundle.pieces.covering(stored.bundle.artifact.headers()))
        self.want(user, headers)
        await self.provider.wait_for(headers)
        placed = replace(options, model=str(stored.paths[0]))
        needed = await needed_pieces(binary, placed, stored)
        self.want(user, needed)
        return placed, ProvidedModel(
            self.provider, needed, options.layers or stored.bundle.artifact.whole, wished_s=wished_s
        )

    def forget(self, user: object) -> None:
        """``user`` wants nothing any more. What is there stays in the store."""
        self._wants.pop(user, None)
        with contextlib.suppress(MeshnetError):
            self.provider.want(frozenset().union(*self._wants.values()))

    async def failed(self) -> None:
        """Wait until the provider fails. Raises what it failed with: ``StoreError``, ``ArtifactError``."""
        await asyncio.shield(self._running)

    async def close(self) -> None:
        """Stop fetching and serving, with everything on record."""
        for task in (self._telling, self._running):
            task.cancel()
        await asyncio.gather(self._telling, self._running, return_exceptions=True)

    async def _tell(self, on_progress: Callable[[ProviderState], None]) -> None:
        was_complete = False
        with contextlib.suppress(MeshnetError):
            while True:
                state = await self.provider.changed()
                is_complete = self.provider.is_complete()
                if not (is_complete and was_complete):
                    on_progress(state)
                was_complete = is_complete


class Providers:
    """Gives out `Provided`; one per artifact at a time."""

    def __init__(
        self,
        client: TrackerClient,
        library: Library,
        options: SwarmOptions,
        *,
        trackers: Sequence[str],
        on_progress: Callable[[ProviderState], None] = lambda state: None,
    ) -> None:
        self._client = client
        self._library = library
        self._options = options
        self._trackers = trackers
        self._on_progress = on_progress
        self._in_use: dict[str, Provided] = {}
        #: Held over beginning and ending with an artifact.
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @contextlib.asynccontextmanager
    async def using(self, digest: str) -> AsyncIterator[Provided]:
        """The artifact, provided while the block runs. Waits while no tracker tells what it is.

        Raises:
            UnknownArtifact: neither tracker nor store know it.
            ArtifactError, StoreError: what is there of it is no good, or the store cannot be used.
        """
        async with self._changing[digest]:
            provided = self._in_use.get(digest)
            if provided is None or not provided.is_running:
                provided = await self._begin(digest)
            provided.n_users += 1
        try:
            yield provided
        finally:
            provided.n_users -= 1
            async with self._changing[digest]:
                if provided.n_users == 0:
                    await provided.close()
                    if self._in_use.get(digest) is provided:
                        del self._in_use[digest]

    async def _begin(self, digest: str) -> Provided:
        stored: StoredArtifact = await find_artifact(self._client, self._library, digest)
        provider = Provider(self._library, stored, self._port_of_its_own(), trackers=self._trackers)
        self._in_use[digest] = provided = Provided(provider, self._on_progress)
        return provided

    def _port_of_its_own(self) -> SwarmOptions:
        host, _, port = self._options.listen.rpartition(":")
        if port == "0" or not self._in_use:
            return self._options
        port = str(free_port(host)) if host in WILDCARDS else "0"
        log.info("another artifact has the port %s; this one gets another", self._options.listen)
        return replace(self._options, listen=f"{host}:{port}")


class RangePreparation:
    """Gets the bytes of assigned ranges from the swarm: a `meshnet.node.assigned.Preparation`.

    ``options`` say how every worker is started, apart from what the assignment says.
    """

    def __init__(self, providers: Providers, binary: Path, options: WorkerOptions, endpoint: Endpoint) -> None:
        self._providers = providers
        self._binary = binary
        self._options = options
        self._endpoint = endpoint

    @contextlib.asynccontextmanager
    async def __call__(self, assignment: Assignment, *, wished_s: float) -> AsyncIterator[Prepared]:
        """Raises as `Providers.using` and `Provided.range`."""
        wanted = replace(
            self._options,
            layers=assignment.layers,
            context_tokens=assignment.context_tokens,
            sessions=assignment.sessions,
        )
        async with self._providers.using(assignment.artifact_digest) as provided:
            user = object()
            try:
                options, source = await provided.range(user, self._binary, wanted, wished_s=wished_s)
                plan = WorkerPlan(
                    binary=self._binary,
                    options=options,
                    model_name=assignment.model,
                    artifact_digest=assignment.artifact_digest,
                    endpoint=self._endpoint,
                    source=source,
                )
                yield Prepared(plan, provided.failed)
            finally:
                provided.forget(user)
