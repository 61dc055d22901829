"""Starts generations: finds a route for each, tries another where a hop refuses, and sees every one to its end.

However a generation ends (end token, length, stop string, client gone, failure, deadline), its end runs in a task of
its own, so that no cancellation leaves Hot KV behind on a hop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from meshnet.core import FinishCause, RouteSession, RouteSource
from meshnet.errors import (
    HopLost,
    HopRefused,
    MeshnetError,
    NoRoute,
    Overloaded,
    RouteError,
    TrackerUnavailable,
    for_the_log,
)
from meshnet.gateway.background import Background
from meshnet.gateway.ends import SessionEnds
from meshnet.gateway.generation import Generation, GenerationRequest
from meshnet.gateway.hops import Hop, RouteHops
from meshnet.gateway.metrics import GatewayMetrics
from meshnet.gateway.prompts import guess_tokens
from meshnet.gateway.repair import Repairer
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.client import WorkerPool, refusal_name
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.telemetry.generation import Timeline

_log = logging.getLogger(__name__)

_NO_CAPACITY = refusal_name(pb.REFUSAL_NO_CAPACITY)

_MAX_DESCRIPTIONS = 256

#: However short a lease a tracker tells of.
_LEAST_RENEW_S = 0.1


class Generations:
    """All generations of one gateway. Owns the connections to workers; ``close`` it."""

    def __init__(self, routes: RouteSource, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._routes = routes
        self._pool = WorkerPool()
        self._background = Background()
        self._ends = SessionEnds(routes, settings)
        self._repairer = Repairer(routes, self._pool, settings, self._background, self._ends)
        self._running: set[Generation] = set()
        self._n_started = 0
        self._renewing: asyncio.Task[None] | None = None
        # By artifact digest: artifacts do not change, so neither do their vocabulary and template.
        self._descriptions: dict[str, pb.DescribeResponse] = {}

    @contextlib.asynccontextmanager
    async def start(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """A running generation; at exit it is ended on every hop, and its telemetry is complete.

        A hop that refuses or is lost before generation begins leads to another route, a bounded number of times.

        Raises:
            RequestError: unknown model, a prompt that does not fit, a parameter the model cannot serve.
            RouteError, TrackerUnavailable: the mesh cannot serve the request.
        """
        received_s = time.monotonic()
        if self._n_started >= self.settings.max_running:
            raise Overloaded(f"this gateway already runs {self._n_started} answers; try again later")
        self._n_started += 1
        self.metrics.running.inc()
        try:
            generation = await self._open(request, received_s)
            self._running.add(generation)
            self._renew_while_running()
            try:
                yield generation
            except BaseException as error:
                await generation.abort(error)
                raise
            finally:
                self._running.discard(generation)
            await generation.end(generation.finish_cause or FinishCause.CANCELLED)
        finally:
            self._n_started -= 1
            self.metrics.running.dec()

    async def close(self) -> None:
        """Wait for the ends of generations, which are bounded in time, then drop all connections."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._background.close(timeout_s=2 * self.settings.call_timeout_s + self.settings.close_timeout_s)
        await self._ends.close()
        await self._pool.close()

    async def _open(self, request: GenerationRequest, received_s: float) -> Generation:
        refusals: list[HopRefused | HopLost] = []
        while True:
            session = await self._open_session(request, refusals)
            hops = RouteHops(session, self._pool, self.settings, self._background)
            generation = Generation(
                request,
                hops,
                Timeline(received_s),
                settings=self.settings,
                metrics=self.metrics,
                background=self._background,
                repairer=self._repairer,
                on_end=self._ends.record,
            )
            try:
                await generation.open(await self._description(hops.head))
                return generation
            except (HopRefused, HopLost) as error:
                await generation.abort(error)
                _log.warning("%s; trying another route", for_the_log(error))
                refusals.append(error)
            except BaseException as error:
                await generation.abort(error)
                raise
            if len(refusals) >= self.settings.route_attempts:
                raise _no_route_left(refusals)

    async def _open_session(self, request: GenerationRequest, refusals: Sequence[HopRefused | HopLost]) -> RouteSession:
        opening = asyncio.ensure_future(
            self._routes.open_session(
                request.model,
                avoid_shards=[refusal.shard_id for refusal in refusals],
                prompt_tokens=guess_tokens(request.prompt),
                answer_tokens=request.answer_tokens,
            )
        )
        try:
            async with asyncio.timeout(self.settings.call_timeout_s):
                return await asyncio.shield(opening)
        except TimeoutError as error:
            self._background.run(self._ends.abandon(opening))
            raise TrackerUnavailable(f"the tracker chose no route within {self.settings.call_timeout_s:g} s") from error
        except asyncio.CancelledError:
            self._background.run(self._ends.abandon(opening))
            raise
        except (NoRoute, Overloaded) as error:
            if refusals:
                raise _no_route_left(refusals) from error
            raise

    def _renew_while_running(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name="renew sessions")

    async def _renew(self) -> None:
        """Tell the tracker from time to time which sessions are still wanted; ends when none is left."""
        while True:
            pause_s = self._renew_s()
            await asyncio.sleep(pause_s)
            wanted = [generation.session_id for generation in self._running]
            if not wanted:
                return
            try:
                async with asyncio.timeout(min(self.settings.call_timeout_s, pause_s)):
                    unknown = await self._routes.renew_sessions(wanted)
            except (MeshnetError, TimeoutError) as error:
                _log.warning("%d sessions could not be renewed: %s", len(wanted), str(error) or "no answer in time")
                continue
            if unknown:
                _log.warning("the tracker does not know %d running sessions any more; they go on", len(unknown))

    def _renew_s(self) -> float:
        """Three times in the shortest lease at least."""
        leases_s = [generation.lease_s for generation in self._running if generation.lease_s is not None]
        return min([self.settings.renew_s, *(max(_LEAST_RENEW_S, lease_s / 3) for lease_s in leases_s)])

    async def _description(self, head: Hop) -> pb.DescribeResponse:
        """Vocabulary facts and chat template of the route's artifact."""
        digest = head.shard.artifact_digest
        description = self._descriptions.get(digest)
        if description is None:
            description = await head.worker.describe(timeout_s=self.settings.call_timeout_s)
            if description.artifact_digest != digest:
                raise HopRefused(
                    f"{head.worker} serves another artifact than its route says",
                    refusal=refusal_name(pb.REFUSAL_WRONG_ARTIFACT),
                    shard_id=head.shard.shard_id,
                )
            if len(self._descriptions) >= _MAX_DESCRIPTIONS:
                self._descriptions.pop(next(iter(self._descriptions)))
            self._descriptions[digest] = description
        return description


def _no_route_left(refusals: Sequence[HopRefused | HopLost]) -> RouteError:
    """What to tell the client after every route that was tried refused."""
    if any(isinstance(refusal, HopRefused) and refusal.refusal == _NO_CAPACITY for refusal in refusals):
        return Overloaded(f"every route is full; try again later ({refusals[-1]})")
    return refusals[-1]
