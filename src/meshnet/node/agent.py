"""The node agent: keeps its shards served and the tracker informed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from meshnet.core import Shard
from meshnet.errors import LeaseLost, MeshnetError, NotAuthorized, RequestError, TrackerUnavailable
from meshnet.node.identity import NodeIdentity
from meshnet.node.settings import NodeSettings
from meshnet.node.shard import ShardKeeper
from meshnet.node.worker import WorkerPlan
from meshnet.rpc.client import WorkerPool
from meshnet.tracker.client import TrackerClient
from meshnet.tracker.messages import Departure, Heartbeat, Lease

log = logging.getLogger(__name__)


class Agent:
    """One node. ``on_ready`` is called with each shard whenever a worker has become ready for it."""

    def __init__(
        self,
        identity: NodeIdentity,
        tracker: TrackerClient,
        plans: Sequence[WorkerPlan],
        settings: NodeSettings | None = None,
        *,
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
            stopping = asyncio.create_task(stop.wait(), name="stop")
            try:
                done, _ = await asyncio.wait([stopping, reporting, *serving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                # A registration on its way is waited for: cancelled, it would leave a node behind that nobody ends.
                self._leaving = True
                self._changed.set()
                await asyncio.wait([reporting], timeout=self._settings.departure_timeout_s)
                await _end([reporting, stopping])
                await self._depart()
                await _end(serving)
        for task in done - {stopping}:
            task.result()

    def kill_workers(self) -> None:
        """End the workers without draining: for a second Ctrl-C."""
        for keeper in self._keepers:
            keeper.kill()

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
        offered = await asyncio.gather(*(keeper.advertisement(pool) for keeper in self._keepers))
        await self._tracker.heartbeat(
            self._node_id,
            Heartbeat(
                lease_epoch=lease.lease_epoch,
                instance=self._instance,
                shards=tuple(advertised for advertised in offered if advertised is not None),
            ),
        )

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
