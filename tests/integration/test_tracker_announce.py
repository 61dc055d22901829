"""libtorrent's own peers, that meet at a real `meshnet serve` or not at all."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import libtorrent
import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.tracker.announce import announce_url
from meshnet.tracker.auth import announce_key
from meshnet.tracker.messages import PublishedArtifact
from tests.support.mesh import API_KEY, JOIN_TOKEN, Mesh, end, mesh, until
from tests.support.published import small_bundle


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path) as started:
        await started.serve()
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def bundle(models: Path) -> Bundle:
    return small_bundle(models)


@contextmanager
def torrent_client(bundle: Bundle, directory: Path, tracker: str) -> Iterator[Any]:
    """A libtorrent session with one torrent, that finds others through the tracker or not at all."""
    settings = {
        "listen_interfaces": "127.0.0.1:0",
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "allow_multiple_connections_per_ip": True,
        "unchoke_interval": 1,
        "alert_mask": libtorrent.alert.category_t.tracker_notification,
    }
    session = libtorrent.session(cast(Any, settings))
    parameters = libtorrent.add_torrent_params()
    parameters.ti = libtorrent.torrent_info(bundle.torrent)
    directory.mkdir(exist_ok=True)
    parameters.save_path = str(directory)
    parameters.trackers = [tracker]
    try:
        yield session.add_torrent(parameters)
    finally:
        # Says goodbye, and waits until that has been heard.
        del session


def announce_now(peer: Any) -> None:
    every_tracker, at_once = -1, 0
    peer.force_reannounce(at_once, every_tracker, libtorrent.reannounce_flags_t.ignore_min_interval)


async def published(net: Mesh) -> PublishedArtifact:
    async with net.client() as client:
        (told,) = await client.artifacts()
        return told


async def counted(net: Mesh, peers: int, complete: int) -> None:
    async def is_so() -> bool:
        told = await published(net)
        return (told.peers, told.complete_peers) == (peers, complete)

    await until(f"the tracker counts {peers} peers, {complete} of them complete", is_so)


async def complete(peer: Any) -> None:
    async def is_so() -> bool:
        return bool(peer.status().is_seeding)

    await until("everything is there", is_so)


async def answered(peer: Any, what: str) -> None:
    async def is_so() -> bool:
        return what in str(peer.trackers())

    await until(f"the tracker answers {what!r}", is_so)


async def test_peers_find_each_other_and_strangers_nobody(
    net: Mesh, bundle: Bundle, models: Path, tmp_path: Path
) -> None:
    async with net.client() as client:
        await client.publish(bundle)
    url = announce_url(net.url, JOIN_TOKEN)
    another = announce_url(net.url, "join-of-another-mesh")
    with torrent_client(bundle, models, url) as seeder, torrent_client(bundle, tmp_path / "s", another) as stranger:
        await complete(seeder)
        await counted(net, 1, 1)
        for name in ("first", "second"):
            with torrent_client(bundle, tmp_path / name, url) as peer:
                await complete(peer)
                await counted(net, 2, 2)
            assert (tmp_path / name / "small.gguf").read_bytes() == (models / "small.gguf").read_bytes()
            # By its goodbye, long before it would have been forgotten.
            await counted(net, 1, 1)
        await answered(stranger, "wrong announce key")
        assert (stranger.status().num_peers, stranger.status().total_done) == (0, 0)
    await counted(net, 0, 0)


async def test_before_publication_and_after_a_restart(tmp_path: Path, bundle: Bundle, models: Path) -> None:
    async with mesh(tmp_path) as net:
        serving = await net.serve()
        with torrent_client(bundle, models, announce_url(net.url, JOIN_TOKEN)) as seeder:
            await answered(seeder, "publish it first")
            async with net.client() as client:
                await client.publish(bundle)
            before = await published(net)
            announce_now(seeder)
            await counted(net, 1, 1)
            assert await end(serving, signal.SIGKILL) == -signal.SIGKILL
            await net.serve()
            # Publications are kept, peers announce themselves again.
            assert await published(net) == before
            announce_now(seeder)
            await counted(net, 1, 1)
            async with net.client() as client:
                assert await client.artifact("small") == bundle


def percent(data: bytes) -> str:
    return "".join(f"%{byte:02x}" for byte in data)


def bdecode(answer: httpx.Response) -> Any:
    return libtorrent.bdecode(answer.content)


async def test_errors_are_told_in_the_protocol(net: Mesh, bundle: Bundle) -> None:
    async with net.client() as client:
        await client.publish(bundle)
    right = announce_key(JOIN_TOKEN)
    good = f"info_hash={percent(bytes.fromhex(bundle.info_hash)[:20])}&peer_id={'x' * 20}&port=7000&left=0"
    cases = [
        (f"announce/{right[:-1]}x?{good}", "wrong announce key"),
        (f"scrape/{JOIN_TOKEN}?{good}", "wrong announce key"),
        (f"announce/{right}", "info_hash is not 20 bytes long"),
        (f"announce/{right}?{good.replace('7000', '0')}", "port is not that of a peer"),
        (f"announce/{right}?{good}{'&x=y' * 100}", "more than 100 parameters"),
        (f"announce/{right}?info_hash={'y' * 20}&peer_id={'x' * 20}&port=7000", "publish it first"),
        (f"scrape/{right}?info_hash=y", "info_hash is missing or not 20 bytes long"),
    ]
    # No Authorization header: BitTorrent clients have none.
    async with httpx.AsyncClient(base_url=net.url) as http:
        for path, told in cases:
            answer = await http.get(f"/{path}")
            assert answer.status_code == 200
            assert told in bdecode(answer)[b"failure reason"].decode(), path
        assert (await published(net)).peers == 0
        assert bdecode(await http.get(f"/announce/{right}?{good}"))[b"complete"] == 1
        assert [(told.peers, told.complete_peers) for told in [await published(net)]] == [(1, 1)]
        scraped = bdecode(await http.get(f"/scrape/{right}?{good}"))
        assert [counts[b"complete"] for counts in scraped[b"files"].values()] == [1]
        # The gateway beside it goes on as before.
        answer = await http.get("/v1/models", headers={"authorization": f"Bearer {API_KEY}"})
        assert answer.json() == {"object": "list", "data": []}
