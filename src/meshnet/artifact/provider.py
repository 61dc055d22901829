"""Keeps what this machine needs of an artifact on its disk: fetched, verified, served to others, and looked after.

Of all processes on one store that want pieces of the same artifact, one writes: it fetches what any of them wants.
The others look at its record, and one of them takes over when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from meshnet.artifact.library import Library
from meshnet.artifact.scrub import SCRUB_BYTES_PER_S, Scrub
from meshnet.artifact.sources import Address
from meshnet.artifact.stored import Damage, StoredArtifact, Writer
from meshnet.artifact.swarm import Swarm, SwarmOptions, SwarmState
from meshnet.artifact.wants import Wants
from meshnet.artifact.web_seeds import usable_web_seeds
from meshnet.errors import MeshnetError

log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_S = 0.25
#: The same while nothing is missing: a machine that lends its cores should not spend them on looking.
IDLE_STEP_S = 1.0
#: libtorrent has written everything so long after the last piece.
SETTLE_S = 5.0
#: How often one process looks at what the others want, and whether the writer is gone.
LOOK_S = 0.5
#: Web seeds are looked for anew when nothing has arrived for so long.
STALL_S = 10.0
#: Damaged pieces that are named in the log, at most, of those that are found at once.
_NAMED = 10


@dataclass(frozen=True)
class ProviderState:
    """How far it is. ``writing`` is False while another process of this machine does the work."""

    wanted_bytes: int = 0
    verified_bytes: int = 0
    writing: bool = False
    checking: bool = False
    swarm: SwarmState = field(default_factory=SwarmState)

    @property
    def complete(self) -> bool:
        return self.verified_bytes == self.wanted_bytes


class Provider:
    """Provides one artifact; made by `providing`."""

    def __init__(
        self,
        library: Library,
        stored: StoredArtifact,
        options: SwarmOptions,
        *,
        trackers: Sequence[str] = (),
        web_seeds: Sequence[str] = (),
        peers: Sequence[Address] = (),
        scrub_bytes_per_s: int = SCRUB_BYTES_PER_S,
        on_damage: Callable[[Damage], None] | None = None,
    ) -> None:
        self.stored = stored
        self._library = library
        self._options = options
        self._trackers = trackers
        self._extra_web_seeds = web_seeds
        self._peers = peers
        self._scrub_bytes_per_s = scrub_bytes_per_s
        self._on_damage = on_damage
        self._wants = Wants(stored)
        self._wanted: frozenset[int] = frozenset()
        #: Wanted and verified pieces when their bytes were last added up.
        self._seen: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        self._seen_bytes = (0, 0)
        self._is_idle = False
        self._settled_at = time.monotonic()
        self._changed = asyncio.Condition()
        self._state = ProviderState()
        #: True once somebody has compared the record with the files: they may have been written to meanwhile.
        self._looked_at = False
        self._failure: Exception | None = None
        self._cancelled = False
        #: libtorrent and the record are used from one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm")
        self.port: int | None = None

    @property
    def state(self) -> ProviderState:
        return self._state

    def want(self, pieces: Iterable[int]) -> None:
        """Fetch and keep these pieces, and no others.

        Raises:
            StoreError: they do not fit on the disk or into the quota.
        """
        wanted = frozenset(pieces)
        missing = wanted - self.stored.verified()
        if missing:
            self._library.ensure_room(self.stored, lambda: self.stored.bundle.pieces.bytes_of(missing))
        self._wanted = wanted
        self._wants.write(wanted)

    def is_complete(self) -> bool:
        """True if all that is wanted is there and was found right."""
        return self._has(self._wanted)

    async def wait_complete(self) -> None:
        """Wait until all that is wanted is there.

        Raises:
            StoreError, ArtifactError: it cannot be had, with the reason.
        """
        await self.wait_for(self._wanted)

    async def wait_for(self, pieces: Iterable[int]) -> None:
        """Wait until these are there, of those that are wanted. Raises as `wait_complete`."""
        needed = frozenset(pieces)
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or self._has(needed))
        if self._failure is not None:
            raise self._failure

    async def changed(self) -> ProviderState:
        """Wait for news. Raises as `wait_complete`."""
        async with self._changed:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        return self._state

    async def run(self) -> None:
        """Provide until cancelled. Raises as `wait_complete`."""
        try:
            with self._library.holding(self.stored), self._wants:
                while True:
                    with self.stored.writing() as writer:
                        if writer is not None:
                            await self._write(writer)
                        self._looked_at = writer is None and self.stored.is_looked_at()
                    await self._tell(self._measured(writing=False))
                    await asyncio.sleep(LOOK_S)
        except Exception as error:
            # Of any kind: whoever waits must hear of it.
            self._failure = error
            await self._tell(self._state)
            raise
        finally:
            self._thread.shutdown(wait=False)

    async def _write(self, writer: Writer) -> None:
        self._looked_at = False
        await self._tell(self._measured(writing=True))
        self._report(await self._in_thread(lambda: writer.recover(self._go_on)))
        self._looked_at = True
        swarm: Swarm | None = None

        def join() -> Swarm:
            nonlocal swarm
            swarm = Swarm(writer, self._options, trackers=self._trackers, peers=self._peers)
            return swarm

        try:
            joined = await self._in_thread(join)
            self.port = joined.port
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._find_web_seeds(joined))
                tasks.create_task(self._look_after(joined))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            # Also when cancelled: what arrived last must be on record.
            if swarm is not None:
                await self._in_thread(swarm.close)

    async def _find_web_seeds(self, swarm: Swarm) -> None:
        """Find those that are of use; again whenever something is missing and nothing arrives."""
        manifest = self.stored.bundle.manifest
        bases = (*manifest.web_seeds, *self._extra_web_seeds)
        while bases:
            web_seeds, problems = await usable_web_seeds(manifest, bases)
            await self._in_thread(partial(swarm.offer, web_seeds, problems))
            await self._stall(swarm)

    async def _stall(self, swarm: Swarm) -> None:
        """Wait until nothing has arrived for a while, although something is missing."""
        seen, seen_at = -1, time.monotonic()
        while not swarm.lost_redirect and time.monotonic() - seen_at < STALL_S:
            async with self._changed:
                await self._changed.wait()
            state = self._state.swarm
            if not state.missing_bytes or state.downloaded_bytes != seen:
                seen, seen_at = state.downloaded_bytes, time.monotonic()

    async def _look_after(self, swarm: Swarm) -> None:
        scrub = Scrub(self.stored, self._scrub_bytes_per_s)
        looked_at = 0.0
        while True:
            look = time.monotonic() - looked_at >= LOOK_S
            if look:
                looked_at = time.monotonic()
            state, damage = await self._in_thread(partial(self._step, swarm, scrub, look=look))
            self._report(damage)
            await self._tell(replace(self._measured(writing=True), swarm=state))

    def _step(self, swarm: Swarm, scrub: Scrub, *, look: bool) -> tuple[SwarmState, list[Damage]]:
        """In the thread: a moment of the swarm; with ``look``, also at what others do to our files and our disk."""
        damage: list[Damage] = []
        if look:
            swarm.want(self._wanted | self._wants.of_others())
            if swarm.is_astray or self._is_touched():
                damage = swarm.reload(self._go_on)
        state = swarm.step(IDLE_STEP_S if self._is_idle else STEP_S)
        self._is_idle = not state.missing_bytes
        if look and state.missing_bytes:
            self._library.ensure_room(self.stored, lambda: swarm.missing_bytes, underway=True)
        if not swarm.is_astray:
            decayed = scrub.look()
            if decayed:
                swarm.refetch([one.piece for one in decayed])
                damage += decayed
        return state, damage

    def _is_touched(self) -> bool:
        """True if the store's own files were written to although nothing has been missing for a while: not by us."""
        if self.stored.links is not None or not self._is_idle or not self.stored.has(self._wanted):
            self._settled_at = time.monotonic()
        return time.monotonic() - self._settled_at > SETTLE_S and not self.stored.is_unchanged()

    def _report(self, damage: Sequence[Damage]) -> None:
        cure = "fetching it again" if self.stored.links is None else "the file is not the store's: replace it"
        for one in damage[:_NAMED]:
            log.error("damaged: %s; %s", one, cure)
        if len(damage) > _NAMED:
            log.error("damaged: %d more pieces of %s", len(damage) - _NAMED, self.stored.bundle.manifest.name)
        if self._on_damage is not None:
            for one in damage:
                self._on_damage(one)

    def _has(self, pieces: frozenset[int]) -> bool:
        return self._looked_at and self.stored.has(pieces)

    def _measured(self, *, writing: bool) -> ProviderState:
        seen = (self._wanted, self.stored.verified())
        if any(old is not new for old, new in zip(self._seen, seen, strict=True)):
            # Tens of thousands of pieces, and mostly nothing new.
            pieces = self.stored.bundle.pieces
            self._seen, self._seen_bytes = seen, (pieces.bytes_of(seen[0]), pieces.bytes_of(seen[0] & seen[1]))
        return replace(
            self._state,
            wanted_bytes=self._seen_bytes[0],
            verified_bytes=self._seen_bytes[1],
            writing=writing,
            checking=not self._looked_at,
        )

    async def _tell(self, state: ProviderState) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Never leaves while the thread is at work: it may only write as long as this process has the right to."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._cancelled = True
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            future.exception()  # not missed
            raise

    def _go_on(self, *_: int) -> None:
        """Ends long checks when the provider is cancelled."""
        if self._cancelled:
            raise _Cancelled


class _Cancelled(Exception):
    pass


@contextlib.asynccontextmanager
async def providing(provider: Provider) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``provider`` while the block runs; the task ends early only if it fails."""
    task = asyncio.create_task(provider.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, MeshnetError):
            await task
