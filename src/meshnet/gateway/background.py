"""Tasks that must run to their end whatever happens to whoever started them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Background:
    """Keeps its tasks until they are done; ``close`` waits for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spare_time: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Start ``work``. Await it behind ``asyncio.shield`` if being cancelled must not cancel it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_spare_time(self, work: Coroutine[Any, Any, None]) -> None:
        """Start ``work`` that nobody waits for: ``close`` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._spare_time.add(task)
        task.add_done_callback(self._spare_time.discard)

    async def close(self, *, timeout_s: float) -> None:
        """Wait until nothing runs any more, also nothing started meanwhile; cancel what runs after ``timeout_s``."""
        for task in self._spare_time:
            task.cancel()
        await asyncio.gather(*self._spare_time, return_exceptions=True)
        try:
            async with asyncio.timeout(timeout_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
