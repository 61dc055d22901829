"""One node as a tracker sees it, over HTTP, and the tracker that it talks to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from meshnet.core import FinishCause, HopWork, RouteSession
from meshnet.tracker.app import create_app
from meshnet.tracker.client import HttpRouteSource
from meshnet.tracker.messages import Heartbeat, ShardAdvertisement
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.tracker import Tracker
from tests.support import identities
from tests.support.http import running
from tests.support.shards import advertise, make_shard

TOKEN = "join-0123456789"
INSTANCE = "a" * 32
#: No worker stands behind the shards of a `FakeNode`.
SETTINGS = TrackerSettings(probing=False)


@dataclass
class Served:
    """A tracker in this process, behind a real socket."""

    tracker: Tracker
    client: HttpRouteSource


@asynccontextmanager
async def serving(database: str, settings: TrackerSettings = SETTINGS) -> AsyncIterator[Served]:
    """A tracker on this database while the block runs. It takes shards unproven: no worker is there to be probed."""
    settings = replace(settings or TrackerSettings(), probing=False)
    async with (
        Tracker.open(database, settings) as tracker,
        running(create_app(tracker, TOKEN)) as at,
        HttpRouteSource(at, TOKEN) as client,
    ):
        yield Served(tracker, client)


def shards(*ranges: str) -> tuple[ShardAdvertisement, ...]:
    """Shards of the model ``tiny`` (8 layers), named like their ranges; a name may end with a tag: ``0:3/a``."""
    return tuple(
        advertise(make_shard(name.replace(":", "-").replace("/", "."), name.partition("/")[0])) for name in ranges
    )


@dataclass
class FakeNode:
    """Advertises shards that no worker stands behind."""

    node_id: str = "n1"
    lease_epoch: int = 0
    shards: tuple[ShardAdvertisement, ...] = field(default_factory=lambda: shards("0:3", "3:8"))

    async def join(self, client: HttpRouteSource) -> None:
        self.lease_epoch = (await identities.register_at(client, INSTANCE, self.node_id)).lease_epoch
        await self.report(client)

    async def report(self, client: HttpRouteSource) -> None:
        beat = Heartbeat(lease_epoch=self.lease_epoch, instance=INSTANCE, shards=self.shards)
        await client.heartbeat(self.node_id, beat)


def work(session: RouteSession, *, prefill: int = 10, decode: int = 5) -> tuple[HopWork, ...]:
    """What every hop of a session reports at its end."""
    return tuple(
        HopWork(
            epoch=session.epoch,
            hop_index=index,
            shard_id=shard.shard_id,
            layers=shard.layers,
            prefill_tokens=prefill,
            decode_tokens=decode,
            compute_us=1000,
            bytes_in=100,
            bytes_out=200,
        )
        for index, shard in enumerate(session.route.shards)
    )


async def finish(client: HttpRouteSource, session: RouteSession, *reports: HopWork) -> None:
    """Close a session as a gateway does."""
    await client.close_session(
        session.session_id, finish_cause=FinishCause.EOG, generated_tokens=5, work=reports or work(session)
    )
