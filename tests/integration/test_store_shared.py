"""Several processes on one store: one fetches for all, another takes over, nobody removes what is in use."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library
from meshnet.artifact.provider import Provider, providing
from tests.support.command import environment, run
from tests.support.file_server import FileServer
from tests.support.pull_process import Pull, Pulls
from tests.support.swarm import OPTIONS, assert_record_is_true, half, until, write_layers


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_layers(tmp_path / "model.gguf")


@pytest.fixture
def bundle(model: Path) -> Bundle:
    return create_bundle(model)


def server_of(model: Path, n_clients: int) -> FileServer:
    """A server with a place for each client, which tells who asked."""
    return FileServer({f"/{number}/model.gguf": model for number in range(n_clients)})


def sent_to(server: FileServer, number: int) -> int:
    return server.sent_of(f"/{number}/model.gguf")


async def test_one_fetches_for_both(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stored = Library(store).add(bundle)
    server = server_of(model, 2)
    wanted = [half(bundle), half(bundle, tail=True)]
    with server.running():
        async with Pulls(bundle, tmp_path) as pulls:
            first = await pulls.start(Pull(store, sorted(wanted[0]), web_seeds=[f"{server.url}/0/"], stay=True))
            await until(lambda: stored.verified() == wanted[0])
            second = await pulls.start(Pull(store, sorted(wanted[1]), web_seeds=[f"{server.url}/1/"]))
            assert await pulls.end(second, kill=False) == 0
            assert stored.verified() == wanted[0] | wanted[1]
            assert sent_to(server, 1) == 0, "the second fetched by itself"
            assert await pulls.end(first, kill=True) == -signal.SIGKILL
    assert_record_is_true(stored)


async def test_the_other_takes_over_when_the_first_is_killed(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stored = Library(store).add(bundle)
    server = server_of(model, 2)
    wanted = half(bundle)
    server.bytes_per_s = bundle.pieces.bytes_of(wanted) / 10
    with server.running():
        async with Pulls(bundle, tmp_path) as pulls:
            first = await pulls.start(Pull(store, sorted(wanted), web_seeds=[f"{server.url}/0/"]))
            await until(lambda: sent_to(server, 0) > 1)
            second = await pulls.start(Pull(store, sorted(wanted), web_seeds=[f"{server.url}/1/"]))
            await until(lambda: stored.verified())
            assert sent_to(server, 1) == 0
            assert await pulls.end(first, kill=True) == -signal.SIGKILL
            kept = stored.verified()
            server.bytes_per_s = None
            assert await pulls.end(second, kill=False) == 0
            assert sent_to(server, 1) <= bundle.pieces.bytes_of(wanted - kept) + 1
    assert stored.verified() == wanted
    assert_record_is_true(stored)


async def test_what_nobody_wants_any_more_is_not_fetched(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    store = tmp_path / "store"
    library = Library(store)
    stored = library.add(bundle)
    server = server_of(model, 2)
    wanted, other = half(bundle), half(bundle, tail=True)
    server.bytes_per_s = bundle.pieces.bytes_of(wanted) / 10
    with server.running():
        provider = Provider(library, stored, OPTIONS, web_seeds=[f"{server.url}/0/"])
        provider.want(wanted)
        async with providing(provider), Pulls(bundle, tmp_path) as pulls:
            await until(lambda: provider.state.writing and not provider.state.checking)
            missing = provider.state.swarm.missing_bytes
            second = await pulls.start(Pull(store, sorted(other), web_seeds=[f"{server.url}/1/"]))
            await until(lambda: provider.state.swarm.missing_bytes > missing)
            assert await pulls.end(second, kill=True) == -signal.SIGKILL
            await until(lambda: provider.state.swarm.missing_bytes <= missing)
            server.bytes_per_s = None
            await provider.wait_complete()
            await until(lambda: provider.state.swarm.missing_bytes == 0)
            assert not stored.has(other)


async def test_what_is_in_use_is_not_removed(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stored = Library(store).add(bundle)
    server = server_of(model, 1)
    wanted = half(bundle)
    with server.running():
        async with Pulls(bundle, tmp_path) as pulls:
            user = await pulls.start(Pull(store, sorted(wanted), web_seeds=[f"{server.url}/0/"], stay=True))
            await until(lambda: stored.verified() == wanted)
            refused = await run("artifact", "remove", "model", env=environment(store))
            assert refused.code == 2, refused
            assert "is in use" in refused.err
            assert stored.verified() == wanted
            await pulls.end(user, kill=True)
    removed = await run("artifact", "remove", "model", env=environment(store))
    assert removed.code == 0, removed
    assert not stored.directory.exists()
    assert Library(store).all() == []


async def test_a_provider_leaves_in_time_whatever_its_tracker_does(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    library = Library(tmp_path / "store")
    server = server_of(model, 1)
    server.bytes_per_s = bundle.pieces.bytes_of(half(bundle)) / 20
    with server.running():
        # A tracker that takes calls and never answers must not hold it up either.
        silent = socket.create_server(("127.0.0.1", 0))
        provider = Provider(
            library,
            library.add(bundle),
            OPTIONS,
            web_seeds=[f"{server.url}/0/"],
            trackers=[f"http://127.0.0.1:{silent.getsockname()[1]}/announce"],
        )
        provider.want(half(bundle))
        async with providing(provider):
            await until(lambda: provider.stored.verified())
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 3
        silent.close()
    assert_record_is_true(provider.stored)
    assert not provider.stored.is_written()
