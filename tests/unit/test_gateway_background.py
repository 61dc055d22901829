"""Tasks that outlive whoever started them, within limits."""

from __future__ import annotations

import asyncio

from meshnet.gateway.background import Background


async def test_close_waits_for_tasks_and_for_what_they_start() -> None:
    background = Background()
    done = []

    async def inner() -> None:
        done.append("inner")

    async def outer() -> None:
        await asyncio.sleep(0.01)
        background.run(inner())
        done.append("outer")

    background.run(outer())
    await background.close(timeout_s=5)
    assert done == ["outer", "inner"]


async def test_close_cancels_what_does_not_end() -> None:
    background = Background()
    task = background.run(asyncio.Event().wait())
    await background.close(timeout_s=0.05)
    assert task.cancelled()
