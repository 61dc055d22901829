"""Keeps what this machine needs of an artifact on its disk: fetched, verified, served to others, and looked after.

Of all processes on one store that want pieces of the same artifact, one writes: it fetches what any of them wants.
The others look at its record, and one of them takes over when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from meshnet.artifact.library import Library
from meshnet.artifact.stored import Damage, StoredArtifact, Writer, write_json
from meshnet.artifact.swarm import Swarm, SwarmOptions, SwarmState
from meshnet.artifact.web_seeds import usable_web_seeds
from meshnet.errors import ArtifactError, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_S = 0.25
#: How often one process looks at what the others want, and whether the writer is gone.
LOOK_S = 0.5
#: Bytes per second that looking after what is on the disk may read.
SCRUB_BYTES_PER_S = 16 << 20
SCRUB_PAUSE_S = 1.0
_WANTS = "wants"


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
        scrub_bytes_per_s: int = SCRUB_BYTES_PER_S,
        on_damage: Callable[[Damage], None] | None = None,
    ) -> None:
        self.stored = stored
        self._library = library
        self._options = options
        self._trackers = trackers
        self._extra_web_seeds = web_seeds
        self._scrub_bytes_per_s = scrub_bytes_per_s
        self._on_damage = on_damage
        self._wants = _Wants(stored)
        self._wanted: frozenset[int] = frozenset()
        self._changed = asyncio.Condition()
        self._state = ProviderState()
        self._failure: BaseException | None = None
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
            self._library.ensure_room(self.stored, self.stored.bundle.pieces.bytes_of(missing))
        self._wanted = wanted
        self._wants.write(wanted)

    def is_complete(self) -> bool:
        """True if all that is wanted is there and was found right."""
        return self.stored.has(self._wanted)

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
            await self._changed.wait_for(lambda: self._failure is not None or self.stored.has(needed))
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
                    await self._tell(self._measured(writing=False))
                    await asyncio.sleep(LOOK_S)
        except (StoreError, ArtifactError) as error:
            self._failure = error
            await self._tell(self._state)
            raise
        finally:
            self._thread.shutdown(wait=False)

    async def _write(self, writer: Writer) -> None:
        await self._tell(replace(self._measured(writing=True), checking=True))
        self._report(await self._in_thread(writer.recover))
        web_seeds, problems = await usable_web_seeds(
            self.stored.bundle.manifest, (*self.stored.bundle.manifest.web_seeds, *self._extra_web_seeds)
        )
        swarm = await self._in_thread(
            lambda: Swarm(writer, self._options, trackers=self._trackers, web_seeds=web_seeds)
        )
        self.port = swarm.port
        scrub = _Scrub(self.stored, self._scrub_bytes_per_s)
        looked_at = 0.0
        try:
            while True:
                if time.monotonic() - looked_at >= LOOK_S:
                    looked_at = time.monotonic()
                    wanted = self._wanted | await self._in_thread(self._wants.of_others)
                    await self._in_thread(partial(swarm.want, wanted))
                state = await self._in_thread(lambda: swarm.step(STEP_S))
                state = replace(state, problems={**problems, **state.problems})
                await self._tell(replace(self._measured(writing=True), swarm=state))
                damage = await self._in_thread(scrub.look)
                if damage:
                    self._report(damage)
                    await self._in_thread(partial(swarm.refetch, [one.piece for one in damage]))
        finally:
            # Also when cancelled: what arrived last must be on record.
            await asyncio.shield(self._in_thread(swarm.close))

    def _report(self, damage: Sequence[Damage]) -> None:
        for one in damage:
            cure = "fetching it again" if self.stored.links is None else "the file is not the store's: replace it"
            log.error("damaged: %s; %s", one, cure)
            if self._on_damage is not None:
                self._on_damage(one)

    def _measured(self, *, writing: bool) -> ProviderState:
        pieces = self.stored.bundle.pieces
        return replace(
            self._state,
            wanted_bytes=pieces.bytes_of(self._wanted),
            verified_bytes=pieces.bytes_of(self._wanted & self.stored.verified()),
            writing=writing,
            checking=False,
        )

    async def _tell(self, state: ProviderState) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@contextlib.asynccontextmanager
async def providing(provider: Provider) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``provider`` while the block runs; the task ends early only if it fails."""
    task = asyncio.create_task(provider.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreError, ArtifactError):
            await task


class _Scrub:
    """Looks through the verified pieces again and again, slowly."""

    def __init__(self, stored: StoredArtifact, bytes_per_s: int) -> None:
        self._stored = stored
        self._bytes_per_s = bytes_per_s
        self._left: list[int] = []
        self._due_at = time.monotonic() + SCRUB_PAUSE_S

    def look(self) -> list[Damage]:
        """Check a few pieces, if it is time to."""
        if self._bytes_per_s <= 0 or time.monotonic() < self._due_at:
            return []
        if not self._left:
            self._left = sorted(self._stored.verified(), reverse=True)
        batch: list[int] = []
        n_bytes = 0
        while self._left and n_bytes < self._bytes_per_s * SCRUB_PAUSE_S:
            batch.append(self._left.pop())
            n_bytes += len(self._stored.bundle.pieces.span(batch[-1]))
        self._due_at = time.monotonic() + SCRUB_PAUSE_S
        still_there = self._stored.verified()
        return self._stored.check([piece for piece in batch if piece in still_there])[1]


class _Wants:
    """What this process wants, where the others see it; theirs is void when they are gone."""

    def __init__(self, stored: StoredArtifact) -> None:
        self._directory = stored.directory / _WANTS
        self._path = self._directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._lock: contextlib.ExitStack | None = None
        self._pieces: list[int] = []

    def __enter__(self) -> None:
        self._lock = contextlib.ExitStack()
        try:
            self._directory.mkdir(exist_ok=True)
            lock = self._lock.enter_context(self._lock_path(self._path).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_json(self._path, self._pieces)
        except OSError as error:
            raise StoreError(f"{self._directory} cannot be written: {error.strerror}") from error

    def __exit__(self, *_: object) -> None:
        self._remove(self._path)
        if self._lock is not None:
            self._lock.close()

    def write(self, pieces: Iterable[int]) -> None:
        self._pieces = sorted(pieces)
        if self._lock is not None:
            try:
                write_json(self._path, self._pieces)
            except OSError as error:
                raise StoreError(f"{self._path} cannot be written: {error.strerror}") from error

    def of_others(self) -> frozenset[int]:
        wanted: set[int] = set()
        for path in self._directory.glob("*.json"):
            if path != self._path and self._is_held(path):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    wanted.update(json.loads(path.read_bytes()))
        return frozenset(wanted)

    def _is_held(self, path: Path) -> bool:
        try:
            with self._lock_path(path).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._remove(path)  # its owner is gone
        return False

    def _remove(self, path: Path) -> None:
        for one in (path, self._lock_path(path)):
            one.unlink(missing_ok=True)

    @staticmethod
    def _lock_path(path: Path) -> Path:
        return path.with_suffix(".lock")
