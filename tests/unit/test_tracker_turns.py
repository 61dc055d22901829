"""Who gives way to whom."""

from __future__ import annotations

import asyncio

from meshnet.tracker.turns import Turns


async def test_what_comes_meanwhile_waits_for_one_and_not_for_all() -> None:
    turns, done = Turns(), list[str]()

    async def patient(number: int) -> None:
        await turns.wait()
        done.append(f"patient {number}")

    async def urgent() -> None:
        done.append("urgent")

    waiting = [asyncio.create_task(patient(number)) for number in range(20)]
    await asyncio.create_task(urgent())
    await asyncio.gather(*waiting)
    assert done.index("urgent") <= 1
    assert [name for name in done if name != "urgent"] == [f"patient {number}" for number in range(20)]


async def test_a_cancelled_caller_holds_nobody_up() -> None:
    turns, done = Turns(), list[int]()

    async def patient(number: int) -> None:
        await turns.wait()
        done.append(number)

    tasks = [asyncio.create_task(patient(number)) for number in range(5)]
    await asyncio.sleep(0)
    for number in (1, 3):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 2, 4]
    await asyncio.wait_for(patient(5), 5)
    assert done[-1] == 5
