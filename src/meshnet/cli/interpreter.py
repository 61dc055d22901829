"""Settings of the Python interpreter for a server that answers thousands of small calls with few pauses."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

#: How long a thread may compute while another one waits for the interpreter (Python's own: 5 ms). The server's loop is
#: one of them, and whoever it waits for has to get a turn.
SWITCH_S = 0.0005

#: How often garbage is looked for.
COLLECT_S = 300.0
#: And when this has come and did not go, which is looked at so often: something makes many cycles, or large ones. An
#: answer whose client goes away leaves some 230 objects, with the whole prompt among them.
MANY_OBJECTS = 200_000
MUCH_BYTES = 128 << 20
LOOK_S = 5.0


@asynccontextmanager
async def few_pauses(
    *,
    collect_s: float = COLLECT_S,
    many_objects: int = MANY_OBJECTS,
    much_bytes: int = MUCH_BYTES,
    look_s: float = LOOK_S,
) -> AsyncIterator[None]:
    """Garbage is looked for now and then, not whenever so many objects have come. Afterwards all is as it was.

    What a server drops is freed at once by its reference count; little of it is in cycles. But each heartbeat replaces
    what the one before told, so that Python's collector would look through all nodes several times a second, and
    through every module now and then: calls waited some hundred milliseconds for that.
    """
    collected, switched_s = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    collecting = asyncio.create_task(_collect(collect_s, many_objects, much_bytes, look_s), name="garbage collection")
    try:
        yield
    finally:
        # What `settle` has put away may be garbage from now on, like all else.
        gc.unfreeze()
        sys.setswitchinterval(switched_s)
        if collected:
            gc.enable()
        collecting.cancel()
        await asyncio.wait([collecting])


def settle() -> None:
    """What is there now stays for good, and is not looked through again. To be called once everything is loaded."""
    gc.collect()
    gc.freeze()


async def _collect(collect_s: float, many_objects: int, much_bytes: int, look_s: float) -> None:
    loop = asyncio.get_running_loop()
    collected_s, bytes_then = loop.time(), _resident_bytes()
    while True:
        await asyncio.sleep(min(look_s, collect_s))
        # Objects that were made and not freed are counted all the same when the collector is off.
        if (
            loop.time() - collected_s >= collect_s
            or gc.get_count()[0] >= many_objects
            or _resident_bytes() - bytes_then >= much_bytes
        ):
            gc.collect()
            collected_s, bytes_then = loop.time(), _resident_bytes()


def _resident_bytes() -> int:
    """Of this process; 0 where the kernel does not tell."""
    try:
        with open("/proc/self/statm", "rb") as told:
            return int(told.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
