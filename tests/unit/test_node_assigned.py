"""What a node does with its assignments: what is begun, given up and left alone, and how failures are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.core import LayerRange
from meshnet.errors import MeshnetError, RangeRefused, StoreError
from meshnet.node.assigned import AssignedRanges, Changes, Prepared, changes
from meshnet.node.settings import NodeSettings
from meshnet.tracker.messages import Activity, Assignment

DEADLINE_S = 20.0
#: No pauses that a test would have to wait for.
SETTINGS = NodeSettings(range_retry_s=0.001, range_retry_max_s=0.002)


def assignment(layers: str, *, digit: str = "a", context: int = 512, sessions: int = 2, memory: int = 0) -> Assignment:
    return Assignment(
        artifact_digest=f"sha256:{digit * 64}",
        model="m",
        layers=LayerRange.parse(layers),
        context_tokens=context,
        sessions=sessions,
        memory_bytes=memory,
    )


def test_what_is_held_as_wanted_is_left_alone() -> None:
    held = [assignment("0:3"), assignment("5:8")]
    assert changes(held, [assignment("5:8"), assignment("3:5")]) == Changes(
        begun=(assignment("3:5"),), ended=(assignment("0:3"),)
    )
    assert changes(held, [*held, *held]) == Changes()


@pytest.mark.parametrize("other", [{"context": 1024}, {"sessions": 3}, {"digit": "b"}])
def test_other_parameters_are_another_assignment(other: dict[str, Any]) -> None:
    changed = assignment("0:3", **other)
    assert changes([assignment("0:3")], [changed]) == Changes(begun=(changed,), ended=(assignment("0:3"),))


def test_another_estimate_of_its_memory_is_no_other_assignment() -> None:
    assert changes([assignment("0:3", memory=5)], [assignment("0:3", memory=7)]) == Changes()


POOL = [assignment(layers, digit=digit) for layers in ("0:2", "2:4", "0:4") for digit in "ab"]
some = st.lists(st.sampled_from(POOL), max_size=8)


@given(held=some, wanted=some)
def test_changes_lead_from_one_to_the_other(held: list[Assignment], wanted: list[Assignment]) -> None:
    before = dict.fromkeys(held)
    needed = changes(before, wanted)
    after = [one for one in before if one not in needed.ended] + list(needed.begun)
    assert sorted(map(str, after)) == sorted(set(map(str, wanted)))
    assert not set(needed.begun) & set(before)


class Preparations:
    """Preparations that never have a worker: they wait, or fail as they are told. Counts who is at it."""

    def __init__(self) -> None:
        self.begun: list[Assignment] = []
        self.active: list[Assignment] = []
        self.failures: dict[Assignment, list[Exception]] = {}
        self.release = asyncio.Event()

    def __call__(self, wanted: Assignment, *, wished_s: float) -> AbstractAsyncContextManager[Prepared]:
        return self._run(wanted)

    @asynccontextmanager
    async def _run(self, wanted: Assignment) -> AsyncIterator[Prepared]:
        self.begun.append(wanted)
        self.active.append(wanted)
        try:
            if self.failures.get(wanted):
                raise self.failures[wanted].pop(0)
            await self.release.wait()
            raise MeshnetError("released")
            yield
        finally:
            self.active.remove(wanted)


class Held:
    """Ranges of one node, and what they told."""

    def __init__(self) -> None:
        self.preparations = Preparations()
        self.news = asyncio.Event()
        self.ranges = AssignedRanges(
            "n1", self.preparations, SETTINGS, on_ready=lambda shard: None, on_change=self.news.set
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 (other tasks go on)
                await asyncio.sleep(0)

    def activity(self, layers: str) -> Activity | None:
        return next((one for one in self.ranges.activities() if str(one.layers) == layers), None)


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    started = Held()
    yield started
    await started.ranges.close()
    assert started.preparations.active == []


async def test_ranges_come_and_go_with_the_assignments(held: Held) -> None:
    assert held.ranges.is_idle
    held.ranges.reconcile([assignment("0:3"), assignment("3:5")])
    assert not held.ranges.is_idle
    await held.until(lambda: len(held.preparations.active) == 2)
    assert {(str(one.layers), one.state) for one in held.ranges.activities()} == {
        ("0:3", "pulling"),
        ("3:5", "pulling"),
    }
    held.ranges.reconcile([assignment("3:5"), assignment("5:8")])
    await held.until(lambda: held.preparations.active == [assignment("3:5"), assignment("5:8")])
    # The one that stays was not begun again.
    assert held.preparations.begun.count(assignment("3:5")) == 1
    held.ranges.reconcile([])
    assert held.ranges.is_idle
    await held.until(lambda: held.preparations.active == [])
    await held.until(lambda: held.ranges.activities() == [])


async def test_the_tracker_hears_of_every_change_at_once(held: Held) -> None:
    held.ranges.reconcile([assignment("0:3")])
    assert held.news.is_set()
    await held.until(lambda: len(held.preparations.active) == 1)
    held.news.clear()
    held.ranges.reconcile([assignment("0:3")])
    assert not held.news.is_set()
    held.ranges.reconcile([])
    assert held.news.is_set()


async def test_a_range_that_fails_says_why_and_is_tried_again(held: Held) -> None:
    wanted = assignment("0:3")
    held.preparations.failures[wanted] = [StoreError("the disk is full"), RuntimeError("a fault of ours")]
    held.ranges.reconcile([wanted, assignment("3:5")])
    seen: list[tuple[str, bool]] = []

    def third_try() -> bool:
        told = held.activity("0:3")
        if told is not None and told.state == "failed" and (told.trouble, told.refused) not in seen:
            seen.append((told.trouble, told.refused))
        return held.preparations.begun.count(wanted) == 3

    await held.until(third_try)
    assert seen == [("the disk is full", False), ("RuntimeError: a fault of ours", False)]
    # The other one was left alone.
    assert held.preparations.begun.count(assignment("3:5")) == 1


async def test_a_range_that_no_engine_can_cut_is_told_as_such(held: Held) -> None:
    wanted = assignment("0:3")
    held.preparations.failures[wanted] = [RangeRefused("layers 0:3 cannot be cut out") for _ in range(1000)]
    held.ranges.reconcile([wanted])
    await held.until(lambda: (told := held.activity("0:3")) is not None and told.refused)
    told = held.activity("0:3")
    assert told is not None
    assert (told.state, told.trouble, told.artifact_digest) == (
        "failed",
        "layers 0:3 cannot be cut out",
        wanted.artifact_digest,
    )
