"""Artifacts at the tracker, published and fetched over real sockets."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.errors import ArtifactError, NotAuthorized, TrackerUnavailable, UnknownArtifact
from meshnet.tracker.app import create_app
from meshnet.tracker.client import TrackerClient
from meshnet.tracker.database import sqlite_url
from meshnet.tracker.messages import PublishedArtifact
from meshnet.tracker.publication import MAX_PUBLICATION_BYTES, Publication
from meshnet.tracker.request_body import MAX_BODY_BYTES
from meshnet.tracker.tracker import Tracker
from tests.support.http import running
from tests.support.published import small_bundle

TOKEN = "join-0123456789"
DEADLINE_S = 30.0


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[TrackerClient]:
    async with (
        Tracker.open(sqlite_url(directory / "tracker.sqlite3")) as tracker,
        running(create_app(tracker, TOKEN)) as url,
        TrackerClient(url, TOKEN) as client,
    ):
        yield client


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[TrackerClient]:
    async with serving(tmp_path) as opened:
        yield opened


@pytest.fixture
async def http(client: TrackerClient) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=client.url, headers=headers, timeout=DEADLINE_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def bundle(models: Path) -> Bundle:
    return small_bundle(models)


@pytest.fixture(scope="module")
def other(models: Path) -> Bundle:
    return small_bundle(models, name="other", seed=1, file_name="other.gguf")


async def test_an_artifact_is_published_and_fetched(client: TrackerClient, bundle: Bundle, other: Bundle) -> None:
    assert await client.artifacts() == ()
    told = await client.publish(bundle)
    assert (told.name, told.digest, told.info_hash) == ("small", bundle.digest, bundle.info_hash)
    assert await client.publish(bundle) == told.model_copy(update={"published_unix_s": told.published_unix_s})
    await client.publish(other)
    assert [(published.name, published.peers) for published in await client.artifacts()] == [("other", 0), ("small", 0)]
    for wanted in (bundle.digest, bundle.digest.removeprefix("sha256:")[:8], "small"):
        fetched = await client.artifact(wanted)
        assert fetched == bundle
        assert fetched.info_hash == bundle.info_hash


async def test_publications_outlive_the_tracker(tmp_path: Path, bundle: Bundle) -> None:
    async with serving(tmp_path) as client:
        told = await client.publish(bundle)
    async with serving(tmp_path) as client:
        assert await client.artifacts() == (told,)
        assert await client.artifact("small") == bundle


async def test_what_is_not_there_is_named(client: TrackerClient, bundle: Bundle) -> None:
    for wanted in ("small", bundle.digest):
        with pytest.raises(UnknownArtifact, match=r"nothing has been published yet.*`meshnet artifact publish`"):
            await client.artifact(wanted)
    await client.publish(bundle)
    with pytest.raises(UnknownArtifact, match="published: small"):
        await client.artifact("smal")


async def test_a_name_of_several_is_not_guessed(client: TrackerClient, models: Path, bundle: Bundle) -> None:
    namesake = small_bundle(models, name="small", seed=2, file_name="namesake.gguf")
    await client.publish(bundle)
    await client.publish(namesake)
    with pytest.raises(ArtifactError, match="fits several artifacts") as several:
        await client.artifact("small")
    assert bundle.digest in str(several.value)
    assert namesake.digest in str(several.value)
    assert await client.artifact(namesake.digest) == namesake


async def test_a_stranger_publishes_nothing(client: TrackerClient, bundle: Bundle) -> None:
    async with TrackerClient(client.url, "join-of-another-mesh") as stranger:
        with pytest.raises(NotAuthorized, match="join token"):
            await stranger.publish(bundle)
        with pytest.raises(NotAuthorized, match="join token"):
            await stranger.artifact("small")
    assert await client.artifacts() == ()


def body(manifest: Any, torrent: bytes) -> bytes:
    return json.dumps({"manifest": manifest, "torrent_base64": base64.b64encode(torrent).decode()}).encode()


async def test_bad_publications_are_refused_by_name(
    client: TrackerClient, http: httpx.AsyncClient, bundle: Bundle, other: Bundle
) -> None:
    manifest = json.loads(bundle.manifest.to_json())
    wrong_hash = {**manifest, "artifact": {**manifest["artifact"], "n_layer": 3}}
    cases = [
        (bundle.digest, b"garbage", 422, "bad_request", "Invalid JSON"),
        (bundle.digest, b"{}", 422, "bad_request", "manifest: Field required"),
        (bundle.digest, body([], bundle.torrent), 422, "bad_request", "manifest"),
        (bundle.digest, body({}, bundle.torrent), 422, "bad_artifact", "not a manifest that Meshnet understands"),
        (bundle.digest, body("{", bundle.torrent), 422, "bad_artifact", "not a manifest that Meshnet understands"),
        (bundle.digest, body(manifest, b"garbage"), 422, "bad_artifact", "torrent"),
        (bundle.digest, body(manifest, bundle.torrent[:-1]), 422, "bad_artifact", "torrent"),
        (bundle.digest, body(manifest, other.torrent), 422, "bad_artifact", "torrent"),
        (bundle.digest, body(wrong_hash, bundle.torrent), 422, "bad_artifact", "the manifest is that of another"),
        (other.digest, body(manifest, bundle.torrent), 422, "bad_artifact", f"{bundle.digest}, not {other.digest}"),
        ("small", body(manifest, bundle.torrent), 422, "bad_request", "digest: String should match pattern"),
    ]
    for digest, sent, status, code, told in cases:
        answer = await http.put(f"/tracker/v1/artifacts/{digest}", content=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code), (told, error)
        assert told in error["message"]
    assert await client.artifacts() == ()
    for form in (manifest, json.dumps(manifest)):
        answer = await http.put(f"/tracker/v1/artifacts/{bundle.digest}", content=body(form, bundle.torrent))
        assert (answer.status_code, answer.json()["name"]) == (200, "small")


async def test_publications_may_be_large_but_not_endless(http: httpx.AsyncClient, bundle: Bundle) -> None:
    async def padding(n_bytes: int) -> AsyncIterator[bytes]:
        for _ in range(n_bytes >> 20):
            yield b" " * (1 << 20)
        yield Publication.of(bundle).to_json()

    path = f"/tracker/v1/artifacts/{bundle.digest}"
    assert (await http.put(path, content=padding(2 * MAX_BODY_BYTES))).status_code == 200
    answer = await http.put(path, content=padding(MAX_PUBLICATION_BYTES))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_request")
    assert f"larger than {MAX_PUBLICATION_BYTES} bytes" in answer.json()["error"]["message"]


def a_lying_tracker(listed: PublishedArtifact, handed_out: bytes) -> Any:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            whole_list = b'{"artifacts": [%b]}' % listed.model_dump_json().encode()
            answer = whole_list if scope["path"].endswith("/artifacts") else handed_out
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": answer})

    return application


async def test_a_tracker_that_lies_is_found_out(client: TrackerClient, bundle: Bundle, other: Bundle) -> None:
    listed = await client.publish(bundle)
    manifest = json.loads(bundle.manifest.to_json())
    for handed_out, told in (
        (Publication.of(other).to_json(), f"{other.digest}, not {bundle.digest}"),
        (body(manifest, other.torrent), "torrent"),
        (b"<html>", "JSON"),
    ):
        async with running(a_lying_tracker(listed, handed_out)) as url, TrackerClient(url, TOKEN) as deceived:
            for wanted in ("small", bundle.digest):
                with pytest.raises(ArtifactError, match=f"{url} hands out something else as {bundle.digest}") as lie:
                    await deceived.artifact(wanted)
                assert told in str(lie.value)


async def test_nobody_listening_is_an_unavailable_tracker(bundle: Bundle) -> None:
    async with TrackerClient("http://127.0.0.1:1", TOKEN) as nobody:
        for call in (nobody.artifacts(), nobody.artifact("small"), nobody.publish(bundle)):
            with pytest.raises(TrackerUnavailable, match="no answer from the tracker"):
                await call
