"""The ranges that the planner gives a node: begun, kept and given up as its assignments say."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from meshnet.core import Shard
from meshnet.errors import MeshnetError, RangeRefused
from meshnet.node.model import ModelSource
from meshnet.node.settings import NodeSettings
from meshnet.node.shard import MAX_TROUBLE, ShardKeeper
from meshnet.node.worker import WorkerPlan
from meshnet.tracker.messages import Activity, Assignment

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changes:
    """What a new list of assignments means for a node that has others."""

    begun: tuple[Assignment, ...] = ()
    ended: tuple[Assignment, ...] = ()


def substance(assignment: Assignment) -> Assignment:
    """What makes an assignment another one: not the tracker's estimate of the memory, nor whether it is urgent."""
    return assignment.model_copy(update={"memory_bytes": 0, "urgent": False})


def changes(held: Collection[Assignment], wanted: Sequence[Assignment]) -> Changes:
    """What to begin and what to give up. Whatever is wanted just as it is held is left alone."""
    named = {substance(one): one for one in wanted}
    kept = {substance(one) for one in held}
    return Changes(
        begun=tuple(one for key, one in named.items() if key not in kept),
        ended=tuple(one for one in held if substance(one) not in named),
    )


@dataclass(frozen=True)
class Prepared:
    """What a worker for a range is to be started with, while the artifact is provided."""

    plan: WorkerPlan
    #: Waits until the bytes cannot be provided any more, and raises why.
    failed: Callable[[], Awaitable[None]]


class Preparation(Protocol):
    """Gets the bytes of a range and says how to start its worker; ``wished_s`` is on the monotonic clock."""

    def __call__(self, assignment: Assignment, /, *, wished_s: float) -> AbstractAsyncContextManager[Prepared]: ...


class AssignedRange:
    """One assignment over time: pulled, loaded, served, and tried again with growing pauses when that fails."""

    def __init__(
        self,
        node_id: str,
        assignment: Assignment,
        prepare: Preparation,
        settings: NodeSettings,
        *,
        may_load: Callable[[Assignment], Awaitable[None]],
        on_ready: Callable[[Shard], None],
        on_change: Callable[[], None],
    ) -> None:
        self.assignment = assignment
        self._node_id = node_id
        self._prepare = prepare
        self._settings = settings
        self._may_load = may_load
        self._on_ready = on_ready
        self._on_change = on_change
        self._wished_s = time.monotonic()
        self._since_unix_s = time.time()
        self._state = "pulling"
        self._trouble = ""
        self._refused = False
        self.keeper: ShardKeeper | None = None

    async def run(self) -> None:
        """Serve until cancelled; the worker is then drained. Raises nothing else."""
        failures = 0
        while True:
            try:
                await self._attempt()
            except MeshnetError as error:
                reason = str(error)
                self._refused = isinstance(error, RangeRefused)
            except Exception as error:
                # Whatever it is, the other ranges of this node go on.
                log.exception("range %s of %s", self.assignment.layers, self.assignment.model)
                reason = f"{type(error).__name__}: {error}"
            else:
                reason = "it ended by itself"
            failures = 1 if self._served() else failures + 1
            self.keeper = None
            self._enter("failed", reason)
            log.error("layers %s of %s failed: %s", self.assignment.layers, self.assignment.model, reason)
            await asyncio.sleep(self._pause_s(failures))
            self._wished_s = time.monotonic()

    def activity(self) -> Activity | None:
        """What is being done, or None while the range is served."""
        if self.keeper is not None:
            return self.keeper.activity()
        return Activity(
            artifact_digest=self.assignment.artifact_digest,
            model=self.assignment.model,
            layers=self.assignment.layers,
            state=self._state,
            since_unix_s=self._since_unix_s,
            trouble=self._trouble[:MAX_TROUBLE],
            refused=self._refused,
        )

    async def _attempt(self) -> None:
        async with self._prepare(self.assignment, wished_s=self._wished_s) as prepared:
            plan = prepared.plan
            if plan.source is not None:
                plan = replace(plan, source=_Gated(plan.source, partial(self._may_load, self.assignment)))
            self.keeper = ShardKeeper(
                self._node_id, plan, self._settings, on_ready=self._on_ready, on_change=self._on_change
            )
            self._enter("pulling")
            tasks = [asyncio.create_task(self.keeper.run()), asyncio.ensure_future(prepared.failed())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                # The worker drains: what it maps is provided until it has ended.
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()

    def _served(self) -> bool:
        return self.keeper is not None and self.keeper.has_served

    def _enter(self, state: str, trouble: str = "") -> None:
        if trouble:
            self._trouble = trouble
        self._state = state
        self._since_unix_s = time.time()
        self._on_change()

    def _pause_s(self, failures: int) -> float:
        doubled_s = self._settings.range_retry_s * 2.0 ** min(failures - 1, 20)
        return min(doubled_s, self._settings.range_retry_max_s)


class AssignedRanges:
    """All ranges of a node that lends ``memory_bytes``. ``on_change`` is called whenever the tracker should hear of
    something at once."""

    def __init__(
        self,
        node_id: str,
        prepare: Preparation,
        settings: NodeSettings,
        *,
        memory_bytes: int = 0,
        on_ready: Callable[[Shard], None],
        on_change: Callable[[], None],
    ) -> None:
        self._node_id = node_id
        self._prepare = prepare
        self._settings = settings
        self._memory_bytes = memory_bytes
        self._on_ready = on_ready
        self._on_change = on_change
        self._held: dict[Assignment, tuple[AssignedRange, asyncio.Task[None]]] = {}
        self._ending: dict[asyncio.Task[None], AssignedRange] = {}

    @property
    def is_idle(self) -> bool:
        """True if nothing is assigned."""
        return not self._held

    @property
    def keepers(self) -> list[ShardKeeper]:
        """Of all ranges that have come so far, those included that drain."""
        ranges = [one for one, _ in self._held.values()]
        return [one.keeper for one in [*ranges, *self._ending.values()] if one.keeper is not None]

    def reconcile(self, wanted: Sequence[Assignment]) -> None:
        """Begin with what is new, give up what is not named, leave the rest alone. Returns at once."""
        needed = changes(self._held, wanted)
        for assignment in needed.ended:
            log.info("layers %s of %s are not wanted here any more", assignment.layers, assignment.model)
            given_up, task = self._held.pop(assignment)
            self._end(given_up, task)
        for assignment in needed.begun:
            log.info("layers %s of %s are wanted here", assignment.layers, assignment.model)
            begun = AssignedRange(
                self._node_id,
                assignment,
                self._prepare,
                self._settings,
                may_load=self._has_room,
                on_ready=self._on_ready,
                on_change=self._on_change,
            )
            self._held[assignment] = (begun, asyncio.create_task(begun.run(), name=f"range {assignment.layers}"))
        if needed.begun or needed.ended:
            self._on_change()

    def activities(self) -> list[Activity]:
        """What is being done for ranges that are not served."""
        ranges = [one for one, _ in self._held.values()]
        told = [one.activity() for one in [*ranges, *self._ending.values()]]
        return [activity for activity in told if activity is not None]

    async def close(self) -> None:
        """Drain and give up everything."""
        for given_up, task in self._held.values():
            self._end(given_up, task)
        self._held.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def kill(self) -> None:
        """End all workers without draining."""
        for keeper in self.keepers:
            keeper.kill()

    def _end(self, given_up: AssignedRange, task: asyncio.Task[None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._ending.pop(task, None)
            self._on_change()

        self._ending[task] = given_up
        task.add_done_callback(ended)
        task.cancel()

    async def _has_room(self, assignment: Assignment) -> None:
        """Wait until what drains has left enough memory: for a bounded time, and not long if the range is urgent."""
        hurry_s = self._settings.hurried_drain_s if assignment.urgent else None
        while self._ending:
            held = [*self._held, *(one.assignment for one in self._ending.values())]
            if sum(one.memory_bytes for one in held) <= self._memory_bytes and assignment.memory_bytes:
                return
            done, _ = await asyncio.wait(list(self._ending), timeout=hurry_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._hurry(assignment)
            # Their callbacks take them off the list.
            await asyncio.sleep(0)

    def _hurry(self, assignment: Assignment) -> None:
        for one in self._ending.values():
            if one.keeper is not None:
                log.warning("answers wait for layers %s: ending layers %s", assignment.layers, one.assignment.layers)
                one.keeper.kill()


class _Gated:
    """A model whose worker may start for the first time only when there is memory for it."""

    def __init__(self, source: ModelSource, may_load: Callable[[], Awaitable[None]]) -> None:
        self._source = source
        self._may_load = may_load
        self._has_room = False

    @property
    def pull_ms(self) -> int | None:
        return self._source.pull_ms

    def progress(self) -> tuple[int, int]:
        return self._source.progress()

    async def prepare(self) -> None:
        await self._source.prepare()
        if not self._has_room:
            await self._may_load()
            self._has_room = True

    def check(self) -> None:
        self._source.check()
