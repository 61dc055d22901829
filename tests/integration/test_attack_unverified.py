"""A node that comes back to files that were written to meanwhile: no worker may start on what nobody checked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library
from meshnet.artifact.provider import Provider, providing
from meshnet.artifact.stored import Damage, Progress, StoredArtifact
from meshnet.node.model import ProvidedModel
from tests.support.swarm import DEADLINE_S, OPTIONS, everything, until, write_layers


class _SlowDisk(StoredArtifact):
    """Files that are read only when the test says so."""

    go_on = threading.Event()

    def check(self, pieces: Iterable[int], progress: Progress | None = None) -> tuple[list[int], list[Damage]]:
        if not self.go_on.wait(DEADLINE_S):
            raise TimeoutError
        return super().check(pieces, progress)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return create_bundle(write_layers(tmp_path / "model.gguf", n_layer=2))


@pytest.fixture
def stored(bundle: Bundle, tmp_path: Path) -> _SlowDisk:
    """All of the artifact, recorded, and then one byte of it changed."""
    stored = Library(tmp_path / "store").add(bundle)
    stored.files_dir.mkdir()
    (tmp_path / "model.gguf").rename(stored.paths[0])
    with stored.writing() as writer:
        assert writer is not None
        writer.adopt()
    with stored.paths[0].open("r+b") as file:
        file.seek(bundle.artifact.tensors[-1].offset)
        file.write(b"\x00\xff\x00\xff")
    slow = _SlowDisk(stored.directory, bundle, None)
    slow.go_on = threading.Event()
    return slow


async def _is_held_back(work: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait([work], timeout=1)
    return not done


async def test_a_worker_waits_until_the_files_were_looked_at(stored: _SlowDisk, tmp_path: Path) -> None:
    provider = Provider(Library(tmp_path / "store"), stored, OPTIONS)
    provider.want(everything(stored.bundle))
    model = ProvidedModel(provider, everything(stored.bundle), stored.bundle.artifact.whole)
    async with providing(provider), asyncio.timeout(DEADLINE_S):
        starting = asyncio.create_task(model.prepare())
        try:
            assert await _is_held_back(starting)
            assert not provider.is_complete()
            stored.go_on.set()
            await until(lambda: provider.stored.n_lost() == 1)
            # Nobody has the piece, so it never comes back.
            assert await _is_held_back(starting)
        finally:
            stored.go_on.set()
            starting.cancel()


async def test_also_if_another_process_looks(stored: _SlowDisk, tmp_path: Path) -> None:
    writing, following = (Provider(Library(tmp_path / "store"), stored, OPTIONS) for _ in range(2))
    wanted = everything(stored.bundle)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        writing.want(wanted)
        await stack.enter_async_context(providing(writing))
        await until(lambda: writing.state.checking)
        following.want(wanted)
        await stack.enter_async_context(providing(following))
        starting = asyncio.create_task(following.wait_complete())
        stack.callback(starting.cancel)
        stack.callback(stored.go_on.set)
        assert await _is_held_back(starting)
        stored.go_on.set()
        await until(lambda: stored.n_lost() == 1)
        assert await _is_held_back(starting)


async def test_a_follower_starts_once_the_writer_has_looked(stored: _SlowDisk, tmp_path: Path) -> None:
    writing, following = (Provider(Library(tmp_path / "store"), stored, OPTIONS) for _ in range(2))
    stored.go_on.set()
    spared = everything(stored.bundle) - {len(stored.bundle.pieces) - 1}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        writing.want(spared)
        await stack.enter_async_context(providing(writing))
        await writing.wait_complete()
        following.want(spared)
        await stack.enter_async_context(providing(following))
        await following.wait_complete()
        assert not following.state.writing
