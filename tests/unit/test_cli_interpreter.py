"""The interpreter while it serves, and after that."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from meshnet.cli.interpreter import SWITCH_S, few_pauses, settle

DEADLINE_S = 10.0


class Ring:
    """A cycle: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    enabled, switch_s = gc.isenabled(), sys.getswitchinterval()
    yield
    (gc.enable if enabled else gc.disable)()
    sys.setswitchinterval(switch_s)
    gc.unfreeze()


async def until_freed(ring: weakref.ref[Ring]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while ring() is not None:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.005)


async def test_the_collector_does_not_run_by_itself() -> None:
    async with few_pauses():
        assert not gc.isenabled()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        ring = weakref.ref(Ring())
        kept = [[] for _ in range(10 * gc.get_threshold()[0])]  # type: ignore[var-annotated]
        assert ring() is not None
        del kept


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
async def test_afterwards_the_interpreter_is_as_it_was(enabled: bool, fails: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    sys.setswitchinterval(0.004)
    tasks = asyncio.all_tasks()
    try:
        async with few_pauses():
            settle()
            assert gc.get_freeze_count() > 0
            if fails:
                raise ValueError("over")
    except ValueError:
        pass
    assert gc.isenabled() == enabled
    assert sys.getswitchinterval() == pytest.approx(0.004)
    assert gc.get_freeze_count() == 0
    assert asyncio.all_tasks() == tasks


async def test_garbage_is_looked_for_now_and_then() -> None:
    async with few_pauses(collect_s=0.05):
        await until_freed(weakref.ref(Ring()))


async def test_much_garbage_is_not_kept_until_then() -> None:
    async with few_pauses(collect_s=1000.0, many_objects=5_000, look_s=0.01):
        gc.collect()
        ring = weakref.ref(Ring())
        garbage = [Ring() for _ in range(6_000)]
        assert ring() is not None
        del garbage
        await until_freed(ring)


async def test_garbage_that_is_large_is_not_kept_until_then() -> None:
    class Large(Ring):
        def __init__(self) -> None:
            super().__init__()
            self.filler = b"x" * (64 << 20)

    async with few_pauses(collect_s=1000.0, much_bytes=32 << 20, look_s=0.01):
        await asyncio.sleep(0)  # it has seen how much there was before
        await until_freed(weakref.ref(Large()))
