"""Settings of the Python interpreter for a server that answers thousands of small calls with few pauses."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

#: How long a thread may compute while another one waits for the interpreter (Python's own: 5 ms). The server's loop is
#: one of them, and whoever it waits for has to get a turn.
SWITCH_S = 0.0005

#: How often garbage is looked for.
COLLECT_S = 300.0


@asynccontextmanager
async def few_pauses() -> AsyncIterator[None]:
    """Garbage is looked for now and then, not whenever so many objects have come.

    What a server drops is freed at once by its reference count; little of it is in cycles. But each heartbeat replaces
    what the one before told, so that Python's collector would look through all nodes several times a second, and
    through every module now and then: calls waited some hundred milliseconds for that.
    """
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    collecting = asyncio.create_task(_collect(), name="garbage collection")
    try:
        yield
    finally:
        collecting.cancel()
        gc.enable()


def settle() -> None:
    """What is there now stays for good, and is not looked through again. To be called once everything is loaded."""
    gc.collect()
    gc.freeze()


async def _collect() -> None:
    while True:
        await asyncio.sleep(COLLECT_S)
        gc.collect()
