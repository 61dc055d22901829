"""Calls that nobody waits for give way to those that somebody does."""

from __future__ import annotations

import asyncio


class Turns:
    """A queue for such calls: each goes on in a turn of the event loop of its own, so that whatever else has come
    meanwhile is at most one of them behind, and not all."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until it is this caller's turn: at once if nobody had one a moment ago. First come, first served."""
        loop = asyncio.get_running_loop()
        before, this = self._last, loop.create_future()
        self._last = this
        try:
            if before is not None and not before.done():
                await asyncio.shield(before)
        finally:
            loop.call_soon(_end, this)


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
