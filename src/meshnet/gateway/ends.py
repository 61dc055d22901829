"""Ends of sessions on their way to the tracker, with what the hops did."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from meshnet.core import FinishCause, HopWork, RouteSession, RouteSource
from meshnet.errors import MeshnetError, TrackerUnavailable
from meshnet.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)

#: Kept for a tracker that is away; beyond that the oldest are lost.
MAX_WAITING = 10_000


@dataclass(frozen=True)
class SessionEnd:
    """How one session ended."""

    session_id: str
    cause: FinishCause
    generated_tokens: int
    work: Sequence[HopWork] = ()


class SessionEnds:
    """Tells the tracker of every end. A tracker that is away is told later: nobody's work is to be lost."""

    def __init__(self, routes: RouteSource, settings: GatewaySettings) -> None:
        self._routes = routes
        self._settings = settings
        self._waiting: deque[SessionEnd] = deque()
        self._retrying: asyncio.Task[None] | None = None

    @property
    def n_waiting(self) -> int:
        """Ends that the tracker does not know yet."""
        return len(self._waiting)

    async def record(self, end: SessionEnd) -> None:
        """Tell the tracker, now if it answers. What it refuses is logged."""
        if await self._told(end):
            return
        if len(self._waiting) >= MAX_WAITING:
            lost = self._waiting.popleft()
            _log.error("what the hops did for a session of %d tokens is lost: too many wait", lost.generated_tokens)
        self._waiting.append(end)
        if self._retrying is None or self._retrying.done():
            self._retrying = asyncio.create_task(self._retry(), name="record ends of sessions")

    async def abandon(self, opening: asyncio.Future[RouteSession]) -> None:
        """End a session that the tracker opens for somebody who left meanwhile."""
        with suppress(MeshnetError):
            session = await opening
            await self.record(SessionEnd(session.session_id, FinishCause.CANCELLED, 0))

    async def close(self) -> None:
        """Try once more; what is still waiting then is lost, and logged."""
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.gather(self._retrying, return_exceptions=True)
        while self._waiting and await self._told(self._waiting[0]):
            self._waiting.popleft()
        if self._waiting:
            _log.error("the ends of %d sessions could not be recorded: no tracker answers", len(self._waiting))

    async def _retry(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._settings.end_retry_s)
            while self._waiting and await self._told(self._waiting[0]):
                self._waiting.popleft()

    async def _told(self, end: SessionEnd) -> bool:
        """False if it may be told later."""
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                await self._routes.close_session(
                    end.session_id, finish_cause=end.cause, generated_tokens=end.generated_tokens, work=end.work
                )
        except (TrackerUnavailable, TimeoutError) as error:
            _log.warning("the end of a session is recorded later: %s", str(error) or "no answer in time")
            return False
        except MeshnetError as error:
            _log.error("the end of a session could not be recorded: %s", error)
        return True
