"""The node agent: keeps its shards served and the tracker informed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from meshnet.core import Shard
from meshnet.errors import LeaseLost, MeshnetError, NotAuthorized, RequestError, TrackerUnavailable
from meshnet.node.assigned import AssignedRanges, Preparation
from meshnet.node.capacity import Capacity
from meshnet.node.identity import NodeIdentity
from meshnet.node.links import Links
from meshnet.node.settings import NodeSettings
from meshnet.node.shard import ShardKeeper
from meshnet.node.worker import WorkerPlan
from meshnet.rpc.client import WorkerPool
from meshnet.tracker.client import TrackerClient
from meshnet.tracker.messages import (
    MAX_SHARDS_PER_NODE,
    Activity,
    Departure,
    Heartbeat,
    HeartbeatAnswer,
    Lease,
    NodeCapacity,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lending:
    """What a node lends to the planner, and how the ranges that it is given are got ready."""

    capacity: Capacity
    prepare: Preparation


class Agent:
    """One node: serves ``plans``, and with ``lending`` what the tracker assigns.

    ``on_ready`` is called with each shard whenever a worker has become ready for it.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        tracker: TrackerClient,
        plans: Sequence[WorkerPlan],
        settings: NodeSettings | None = None,
        *,
        lending: Lending | None = None,
        on_ready: Callable[[Shard], None] = lambda shard: None,
    ) -> None:
        self._identity = identity
        self._node_id = identity.node_id
        self._tracker = tracker
        self._settings = settings or NodeSettings()
        self._instance = secrets.token_hex(16)
        self._lease: Lease | None = None
        # Set when a shard has come or gone: the tracker hears of it at once, not at the next heartbeat.
        self._changed = asyncio.Event()
        self._leaving = False
        self._keepers = [
            ShardKeeper(identity.node_id, plan, self._settings, on_ready=on_ready, on_change=self._changed.set)
            for plan in plans
        ]
        self._capacity = lending.capacity if lending is not None else None
        self._assigned: AssignedRanges | None = None
        if lending is not None:
            self._assigned = AssignedRanges(
                identity.node_id,
                lending.prepare,
                self._settings,
                memory_bytes=lending.capacity.memory_bytes,
                on_ready=on_ready,
                on_change=self._changed.set,
            )
        self._links = Links()
        self._not_ready: dict[str, str] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set; then withdraw from the tracker, drain the workers, and return.

        A tracker that does not answer is retried for ever while the workers serve on.

        Raises:
            WorkerError: a worker could not be started for the first time.
            ArtifactError: the model file was changed or replaced while it was served.
            NotAuthorized: the tracker refused the join token at the first contact.
            IdentityRefused: the node's id has another key at the tracker, or the node runs on another machine.
            LeaseLost: another process registered with this node's id.
        """
        async with WorkerPool() as pool:
            reporting = asyncio.create_task(self._report(pool), name="heartbeats")
            serving = [asyncio.create_task(keeper.run(), name="shard") for keeper in self._keepers]
            measuring = asyncio.create_task(self._links.run(), name="links")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            try:
                done, _ = await asyncio.wait([stopping, reporting, *serving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                # A registration on its way is waited for: cancelled, it would leave a node behind that nobody ends.
                self._leaving = True
                self._changed.set()
                await asyncio.wait([reporting], timeout=self._settings.departure_timeout_s)
                await _end([reporting, measuring, stopping])
                await self._depart()
                await asyncio.gather(_end(serving), self._give_up_assigned())
        for task in done - {stopping}:
            task.result()

    def kill_workers(self) -> None:
        """End the workers without draining: for a second Ctrl-C."""
        for keeper in self._keepers:
            keeper.kill()
        if self._assigned is not None:
            self._assigned.kill()

    async def _give_up_assigned(self) -> None:
        if self._assigned is not None:
            await self._assigned.close()

    async def _report(self, pool: WorkerPool) -> None:
        accepted = False
        trouble = ""
        while not self._leaving:
            self._changed.clear()
            try:
                if self._lease is None:
                    challenge = await self._tracker.challenge(self._node_id)
                    registration = self._identity.registration(self._instance, challenge.nonce)
                    self._lease = await self._tracker.register(self._node_id, registration)
                    log.info("registered as node %s, lease epoch %d", self._node_id, self._lease.lease_epoch)
                await self._heartbeat(self._lease, pool)
                accepted, trouble = True, ""
                pause_s = self._lease.heartbeat_ms / 1000
                if self._assigned is not None:
                    idle = self._assigned.is_idle
                    pause_s = min(pause_s, self._settings.idle_poll_s if idle else self._settings.lending_poll_s)
            except MeshnetError as error:
                if not _worth_retrying(error, accepted):
                    raise
                if isinstance(error, LeaseLost):
                    self._lease = None
                if str(error) != trouble:
                    log.warning("%s; retrying while the workers serve on", error)
                trouble = str(error)
                pause_s = self._settings.retry_s
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if self._leaving else pause_s):
                    await self._changed.wait()

    async def _heartbeat(self, lease: Lease, pool: WorkerPool) -> None:
        keepers = self._all_keepers()
        offered = [one for one in await asyncio.gather(*(k.advertisement(pool) for k in keepers)) if one is not None]
        answer = await self._tracker.heartbeat(
            self._node_id,
            Heartbeat(
                lease_epoch=lease.lease_epoch,
                instance=self._instance,
                shards=tuple(offered[:MAX_SHARDS_PER_NODE]),
                capacity=await self._offered_capacity(),
                links=self._links.measures,
                activities=tuple(self._activities()[:MAX_SHARDS_PER_NODE]),
            ),
        )
        self._take(answer)

    def _take(self, answer: HeartbeatAnswer) -> None:
        if self._leaving:
            return
        if self._assigned is not None and answer.assignments is not None:
            self._assigned.reconcile(answer.assignments)
        self._links.name(answer.neighbours)
        for shard_id, reason in sorted(answer.not_ready.items()):
            if self._not_ready.get(shard_id) != reason:
                log.info("shard %s takes no sessions yet: %s", shard_id, reason)
        self._not_ready = answer.not_ready

    def _all_keepers(self) -> list[ShardKeeper]:
        return [*self._keepers, *(self._assigned.keepers if self._assigned is not None else ())]

    def _activities(self) -> list[Activity]:
        told = [activity for keeper in self._keepers if (activity := keeper.activity()) is not None]
        return [*told, *(self._assigned.activities() if self._assigned is not None else ())]

    async def _offered_capacity(self) -> NodeCapacity | None:
        # In a thread: it walks over the store now and then.
        return await asyncio.to_thread(self._capacity.read) if self._capacity is not None else None

    async def _depart(self) -> None:
        if self._lease is None:
            return
        try:
            async with asyncio.timeout(self._settings.departure_timeout_s):
                departure = Departure(lease_epoch=self._lease.lease_epoch, instance=self._instance)
                await self._tracker.deregister(self._node_id, departure)
                log.info("left the tracker")
        except (MeshnetError, TimeoutError) as error:
            log.warning("could not say goodbye to the tracker: %s", error)


def _worth_retrying(error: MeshnetError, accepted: bool) -> bool:
    """Whether time may heal it. ``accepted``: the tracker has taken a heartbeat of this agent before."""
    if isinstance(error, LeaseLost):
        return not error.superseded
    if isinstance(error, NotAuthorized | RequestError):
        return accepted
    return isinstance(error, TrackerUnavailable)


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel and wait; what they raise is looked at elsewhere."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
