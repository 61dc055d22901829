"""Artifacts from ordinary web servers, alone and beside peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshnet.artifact import provider
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from tests.support.file_server import FileServer, self_signed
from tests.support.swarm import (
    OPTIONS,
    address,
    assert_record_is_true,
    complete,
    half,
    pulling,
    seeding,
    sha256,
    until,
    write_layers,
    wrong_in_every_piece,
)

NAME = "/models/model.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_layers(tmp_path / "model.gguf")


@pytest.fixture
def bundle(model: Path) -> Bundle:
    return create_bundle(model)


@pytest.fixture
def server(model: Path) -> Iterator[FileServer]:
    with FileServer({NAME: model}).running() as server:
        yield server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "STALL_S", 1.0)


def base(server: FileServer) -> list[str]:
    return [f"{server.url}/models/"]


def slow(bundle: Bundle, seconds: float) -> int:
    """Bytes per second with which a half takes so long."""
    return int(bundle.pieces.bytes_of(half(bundle)) / seconds)


async def test_a_web_seed_alone_sends_the_half_and_nothing_else(
    bundle: Bundle, server: FileServer, tmp_path: Path
) -> None:
    wanted = half(bundle)
    async with pulling(tmp_path / "puller", bundle, wanted, web_seeds=base(server)) as puller:
        await complete(puller)
    assert_record_is_true(puller.stored)
    assert puller.stored.verified() == wanted
    needed_bytes = bundle.pieces.bytes_of(wanted)
    assert needed_bytes <= server.sent_bytes <= 1.02 * needed_bytes
    assert all(request.status == 206 for request in server.requests)


async def test_web_seeds_of_the_manifest_are_used(model: Path, server: FileServer, tmp_path: Path) -> None:
    bundle = create_bundle(model, web_seeds=[f"{server.url}{NAME}"])
    async with pulling(tmp_path / "puller", bundle, range(len(bundle.pieces))) as puller:
        await complete(puller)
    assert sha256(puller.stored.paths[0]) == sha256(model)


async def test_a_web_seed_and_peers_share_the_work(
    model: Path, bundle: Bundle, server: FileServer, tmp_path: Path
) -> None:
    server.bytes_per_s = slow(bundle, 4)
    limited = replace(OPTIONS, upload_limit_bytes_per_s=slow(bundle, 4))
    wanted = half(bundle)
    async with (
        seeding(tmp_path / "seeder", bundle, [model], limited) as seeder,
        pulling(tmp_path / "puller", bundle, wanted, web_seeds=base(server), peers=[address(seeder)]) as puller,
    ):
        await complete(puller)
    assert_record_is_true(puller.stored)
    assert server.sent_bytes > len(wanted) // 10 * bundle.artifact.piece_bytes
    assert seeder.state.swarm.uploaded_bytes > len(wanted) // 10 * bundle.artifact.piece_bytes


async def test_peers_alone(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    async with (
        seeding(tmp_path / "seeder", bundle, [model]) as seeder,
        pulling(tmp_path / "puller", bundle, half(bundle), peers=[address(seeder)]) as puller,
    ):
        await complete(puller)
    assert_record_is_true(puller.stored)


async def test_a_server_without_ranges_is_named_and_not_asked_for_the_whole_file(
    bundle: Bundle, server: FileServer, tmp_path: Path
) -> None:
    server.ranges = False
    server.bytes_per_s = slow(bundle, 10)
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
        await until(lambda: puller.state.swarm.problems)
        (problem,) = puller.state.swarm.problems.items()
        assert problem[0] == base(server)[0]
        assert "ignores Range requests" in problem[1]
        assert puller.state.swarm.web_seeds == 0
        assert server.sent_bytes < bundle.artifact.size_bytes / 4
        # Mended while we wait.
        server.ranges, server.bytes_per_s = True, None
        await complete(puller)
        assert puller.state.swarm.problems == {}
    assert_record_is_true(puller.stored)


async def test_a_server_that_begins_to_ignore_ranges_is_named(
    bundle: Bundle, server: FileServer, tmp_path: Path
) -> None:
    server.bytes_per_s = slow(bundle, 60)
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
        await until(lambda: puller.state.swarm.downloaded_bytes > 0)
        server.ranges = False
        server.cut()
        await until(lambda: "ignores Range" in str(puller.state.swarm.problems))
    assert_record_is_true(puller.stored)


async def test_a_server_that_is_down_at_first_is_named_and_used_later(
    bundle: Bundle, model: Path, tmp_path: Path
) -> None:
    server = FileServer({NAME: model})
    with server.running():
        pass  # to have a port
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
        await until(lambda: "does not answer" in str(puller.state.swarm.problems))
        with server.running():
            await complete(puller)
            await until(lambda: puller.state.swarm.problems == {})
    assert_record_is_true(puller.stored)


async def test_a_server_that_goes_away_and_comes_back(bundle: Bundle, server: FileServer, tmp_path: Path) -> None:
    server.bytes_per_s = slow(bundle, 3)
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
        await until(lambda: puller.state.verified_bytes > 0)
        with server.paused():
            await until(lambda: "does not answer" in str(puller.state.swarm.problems))
        await complete(puller)
    assert_record_is_true(puller.stored)


async def test_another_file_at_the_same_place_is_named(bundle: Bundle, server: FileServer, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"x" * 1000)
    server.files[NAME] = other
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
        await until(lambda: puller.state.swarm.problems)
        told = puller.state.swarm.problems[base(server)[0]]
        assert "is another file: it has 1000 bytes, not" in told


async def test_a_missing_file_is_named(bundle: Bundle, server: FileServer, tmp_path: Path) -> None:
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=[f"{server.url}/"]) as puller:
        await until(lambda: "404" in str(puller.state.swarm.problems))


async def test_https_is_verified(model: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FileServer({NAME: model}, tls=self_signed(tmp_path))
    assert server.tls is not None
    with server.running():
        async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
            await until(lambda: puller.state.swarm.problems)
            assert "certificate verify failed" in puller.state.swarm.problems[base(server)[0]]
        assert puller.stored.verified() == frozenset()
        monkeypatch.setenv("SSL_CERT_FILE", str(server.tls[0]))
        async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
            await complete(puller)
    assert_record_is_true(puller.stored)


async def test_redirects_to_another_place_are_followed(
    model: Path, bundle: Bundle, server: FileServer, tmp_path: Path
) -> None:
    server.files = {"/blobs/0123": model}
    server.redirects = {NAME: "/blobs/0123?signature=abc&expires=1"}
    wanted = half(bundle)
    async with pulling(tmp_path / "puller", bundle, wanted, web_seeds=base(server)) as puller:
        await complete(puller)
    assert_record_is_true(puller.stored)
    assert server.sent_bytes <= 1.02 * bundle.pieces.bytes_of(wanted)


async def test_redirects_that_expire_are_asked_for_anew(
    model: Path, bundle: Bundle, server: FileServer, tmp_path: Path
) -> None:
    server.bytes_per_s = slow(bundle, 4)
    server.files = {"/blobs/1": model}
    server.redirects = {NAME: "/blobs/1"}
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
        await until(lambda: puller.state.verified_bytes > 0)
        server.files = {"/blobs/2": model}
        server.redirects = {NAME: "/blobs/2"}
        server.cut()
        server.bytes_per_s = None
        await complete(puller)
    assert server.sent_of("/blobs/2")
    assert_record_is_true(puller.stored)


async def test_a_corrupting_web_seed_is_banned_and_peers_finish(
    model: Path, bundle: Bundle, server: FileServer, tmp_path: Path
) -> None:
    server.files[NAME] = wrong_in_every_piece(bundle, model, tmp_path / "wrong.gguf")
    async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=base(server)) as puller:
        await until(lambda: base(server)[0] in puller.state.swarm.problems)
        assert puller.state.swarm.problems == {base(server)[0]: "banned: it sent wrong bytes"}
        assert puller.stored.verified() == frozenset()
        async with seeding(tmp_path / "seeder", bundle, [model], peers=[address(puller)]):
            await complete(puller)
        assert puller.state.swarm.problems == {base(server)[0]: "banned: it sent wrong bytes"}
    assert_record_is_true(puller.stored)
