"""Artifacts shared by the ranges of one process: what is wanted together, and how long a provider lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from meshnet.artifact.library import Library
from meshnet.artifact.provider import ProviderState
from meshnet.artifact.swarm_settings import SwarmOptions
from meshnet.errors import StoreError
from meshnet.node import providers
from meshnet.node.providers import Provided, Providers
from meshnet.tracker.client import TrackerClient


class FakeProvider:
    """What a range sees of a provider. ``room``: most pieces that fit."""

    made: list[FakeProvider]

    def __init__(self, library: Any, stored: str, options: SwarmOptions, **others: Any) -> None:
        self.digest = stored
        self.options = options
        self.wanted: frozenset[int] = frozenset()
        self.room = 10
        self.is_running = False
        self.fail = asyncio.Event()
        FakeProvider.made.append(self)

    def want(self, pieces: Iterable[int]) -> None:
        wanted = frozenset(pieces)
        if len(wanted) > self.room:
            raise StoreError("the disk is full")
        self.wanted = wanted

    def is_complete(self) -> bool:
        return False

    async def changed(self) -> ProviderState:
        await asyncio.Event().wait()
        return ProviderState()

    async def run(self) -> None:
        self.is_running = True
        try:
            await self.fail.wait()
            raise StoreError("the drive is gone")
        finally:
            self.is_running = False


async def a_moment() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Providers]:
    async def find_artifact(client: TrackerClient, library: Library, wanted: str) -> str:
        return wanted

    FakeProvider.made = []
    monkeypatch.setattr(providers, "find_artifact", find_artifact)
    monkeypatch.setattr(providers, "Provider", FakeProvider)
    async with TrackerClient("http://127.0.0.1:1", "a-join-token") as client:
        yield Providers(client, Library(tmp_path), SwarmOptions(listen="127.0.0.1:7777"), trackers=())
    await a_moment()
    assert not any(provider.is_running for provider in FakeProvider.made)


def fake(provided: Provided) -> FakeProvider:
    provider: Any = provided.provider
    assert isinstance(provider, FakeProvider)
    return provider


async def test_ranges_of_one_artifact_share_a_provider_and_its_wants(house: Providers) -> None:
    async with house.using("a") as first:
        async with house.using("a") as second:
            assert first is second
            first.want("head", {1, 2})
            first.want("tail", {2, 3})
            assert fake(first).wanted == {1, 2, 3}
            first.want("head", {1})
            assert fake(first).wanted == {1, 2, 3}
            first.forget("tail")
            assert fake(first).wanted == {1}
        await a_moment()
        assert fake(first).is_running
    assert not fake(first).is_running
    assert len(FakeProvider.made) == 1


async def test_what_does_not_fit_costs_nobody_what_he_has(house: Providers) -> None:
    async with house.using("a") as provided:
        provided.want("head", {1, 2})
        with pytest.raises(StoreError, match="the disk is full"):
            provided.want("tail", range(20))
        assert fake(provided).wanted == {1, 2}
        provided.want("other", {3})
        assert fake(provided).wanted == {1, 2, 3}


async def test_an_artifact_that_is_wanted_again_is_provided_anew(house: Providers) -> None:
    async with house.using("a"):
        pass
    async with house.using("a") as provided:
        await a_moment()
        assert fake(provided).is_running
    assert len(FakeProvider.made) == 2


async def test_after_a_failure_the_next_range_has_another_provider(house: Providers) -> None:
    async with house.using("a") as first:
        await a_moment()
        fake(first).fail.set()
        with pytest.raises(StoreError, match="the drive is gone"):
            await first.failed()
        async with house.using("a") as second:
            assert second is not first
            await a_moment()
            assert fake(second).is_running
        assert not fake(second).is_running


async def test_one_artifact_has_the_port_that_was_asked_for_others_have_their_own(house: Providers) -> None:
    async with house.using("a") as first, house.using("b") as second:
        assert fake(first).options.listen == "127.0.0.1:7777"
        assert fake(second).options.listen == "127.0.0.1:0"
    async with house.using("b") as alone:
        assert fake(alone).options.listen == "127.0.0.1:7777"
