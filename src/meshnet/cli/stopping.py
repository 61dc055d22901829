"""How a long-running command ends: by signal, or with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from meshnet.errors import UsageError

STDIN = 0


@contextmanager
def stop_requests(on_stop: Callable[[], None], *, with_parent: bool = False) -> Iterator[None]:
    """Call ``on_stop`` at every SIGTERM and SIGINT, and with ``with_parent`` when standard input closes.

    Needs a running event loop.

    Raises:
        UsageError: ``with_parent`` without a pipe for standard input.
    """
    loop = asyncio.get_running_loop()

    def on_input() -> None:
        if not os.read(STDIN, 65536):
            loop.remove_reader(STDIN)
            on_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop)
    try:
        if with_parent:
            try:
                loop.add_reader(STDIN, on_input)
            except OSError:
                raise UsageError("--exit-with-parent needs a pipe on standard input") from None
        yield
    finally:
        if with_parent:
            loop.remove_reader(STDIN)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def until_stopped(work: Coroutine[Any, Any, None], *, with_parent: bool = False) -> bool:
    """Run ``work``; a stop request cancels it, which cleans up, and another one makes it hurry. True if it was stopped.

    Raises:
        UsageError: as `stop_requests`.
    """
    working = asyncio.create_task(work)

    def stop() -> None:
        working.cancel()

    try:
        with stop_requests(stop, with_parent=with_parent):
            await working
    except asyncio.CancelledError:
        return True
    finally:
        working.cancel()
    return False
