"""The tracker's HTTP face and its client, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshnet.cli import doctor
from meshnet.core import FinishCause, RouteSource
from meshnet.errors import (
    IdentityRefused,
    LeaseLost,
    NoRoute,
    NotAuthorized,
    RequestError,
    TrackerUnavailable,
    UnknownModel,
    UsageError,
)
from meshnet.tracker.app import create_app, other_calls
from meshnet.tracker.client import HttpRouteSource, TrackerClient
from meshnet.tracker.database import sqlite_url
from meshnet.tracker.hot_calls import HOT_PATHS
from meshnet.tracker.messages import Departure, Heartbeat, ShardAdvertisement
from meshnet.tracker.request_body import MAX_BODY_BYTES
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.tracker import Tracker
from tests.support.http import running
from tests.support.identities import OTHER_MACHINE, make_identity, register_at
from tests.support.shards import advertise, make_shard

TOKEN = "join-0123456789"
#: No worker stands behind the shards here.
SETTINGS = TrackerSettings(probing=False)
ME = "a" * 32
OTHER = "b" * 32
SESSION = "0" * 32
DIGEST = f"sha256:{'0' * 64}"
#: With a key in the path instead.
FOR_BITTORRENT = {"/announce/{key}", "/scrape/{key}"}


@pytest.fixture
async def tracker(tmp_path: Path) -> AsyncIterator[Tracker]:
    async with Tracker.open(sqlite_url(tmp_path / "tracker.sqlite3"), SETTINGS) as opened:
        yield opened


@pytest.fixture
async def url(tracker: Tracker) -> AsyncIterator[str]:
    async with running(create_app(tracker, TOKEN)) as at:
        yield at


@pytest.fixture
async def client(url: str) -> AsyncIterator[HttpRouteSource]:
    async with HttpRouteSource(url, TOKEN) as opened:
        yield opened


async def offer(client: TrackerClient, *shards: ShardAdvertisement, node_id: str = "n1", instance: str = ME) -> int:
    lease = await register_at(client, instance, node_id)
    await client.heartbeat(node_id, Heartbeat(lease_epoch=lease.lease_epoch, instance=instance, shards=shards))
    return lease.lease_epoch


def halves(slots: int = 4) -> tuple[ShardAdvertisement, ShardAdvertisement]:
    return advertise(make_shard("a", "0:3", slots=slots)), advertise(make_shard("b", "3:8", slots=slots))


CALLS = [
    ("POST", "/tracker/v1/nodes/n1/challenge"),
    ("POST", "/tracker/v1/nodes/n1/lease"),
    ("POST", "/tracker/v1/nodes/n1/heartbeat"),
    ("POST", "/tracker/v1/nodes/n1/departure"),
    ("GET", "/tracker/v1/models"),
    ("POST", "/tracker/v1/sessions"),
    ("POST", "/tracker/v1/sessions/renew"),
    ("POST", f"/tracker/v1/sessions/{SESSION}/repair"),
    ("POST", f"/tracker/v1/sessions/{SESSION}/end"),
    ("GET", "/tracker/v1/ledger"),
    ("PUT", f"/tracker/v1/artifacts/{DIGEST}"),
    ("GET", "/tracker/v1/artifacts"),
    ("GET", "/tracker/v1/artifacts/small"),
    ("GET", "/tracker/v1/status"),
]
HEADERS: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": TOKEN},
    {"authorization": f"Basic {TOKEN}"},
    {"authorization": "Bearer"},
    {"authorization": f"Bearer {TOKEN[:-1]}"},
    {"authorization": f"Bearer {TOKEN}x"},
    {"authorization": "Bearer " + "\u00e9\u00fc".encode().decode("latin-1")},
]


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_every_call_needs_the_join_token(url: str, tracker: Tracker, method: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        for headers in HEADERS:
            encoded = httpx.Headers(headers, encoding="latin-1")
            answer = await http.request(method, path, headers=encoded, content=b"{}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "not_authorized"), headers
    assert tracker.registry.nodes() == ()


def test_calls_above_are_all_there_are(tracker: Tracker) -> None:
    app = other_calls(tracker, TOKEN)
    paths = {getattr(route, "path", "") for route in app.routes}
    names = {"n1": "{node_id}", SESSION: "{session_id}", DIGEST: "{digest}", "small": "{wanted}"}
    given = {"/".join(names.get(part, part) for part in path.split("/")) for _, path in CALLS}
    assert paths | set(HOT_PATHS) == given | FOR_BITTORRENT


async def test_a_gateway_apart_gets_the_same_route(client: HttpRouteSource, tracker: Tracker) -> None:
    source: RouteSource = client
    await offer(client, *halves())
    session = await source.open_session("tiny", avoid_shards=["nobody"])
    assert [shard.shard_id for shard in session.route.shards] == ["a", "b"]
    assert [model.model for model in await source.models()] == ["tiny"]
    assert tracker.sessions.n_open == 1
    await source.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=3)
    await source.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=3)
    assert tracker.sessions.n_open == 0
    status = await client.status()
    assert (status.open_sessions, status.closed_sessions) == (0, 1)
    assert [(node.node_id, node.state, len(node.shards)) for node in status.nodes] == [("n1", "live", 2)]


async def test_status_explains_what_is_missing(client: TrackerClient) -> None:
    await offer(client, halves()[0])
    (model,) = (await client.status()).models
    assert not model.routable
    assert model.reason == "gap at layer 3: no ready shard holds layers 3:8"
    assert [str(gap) for gap in model.gaps] == ["3:8"]


async def test_status_tells_no_secret(client: HttpRouteSource, url: str) -> None:
    await offer(client, *halves())
    session = await client.open_session("tiny")
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        text = (await http.get(f"{url}/tracker/v1/status")).text
    for secret in (TOKEN, halves()[0].worker_key, session.session_id, session.tickets[0].mac, ME):
        assert secret not in text


async def test_errors_arrive_as_they_were_raised(client: HttpRouteSource) -> None:
    with pytest.raises(UnknownModel, match="no node has offered any model yet"):
        await client.open_session("tiny")
    epoch = await offer(client, *halves())
    with pytest.raises(NoRoute, match="leaving out b"):
        await client.open_session("tiny", avoid_shards=["b"])
    with pytest.raises(RequestError, match="node_id"):
        await client.challenge("-x")
    with pytest.raises(IdentityRefused, match="running elsewhere"):
        await register_at(client, OTHER, make_identity("n1", machine=OTHER_MACHINE))
    with pytest.raises(IdentityRefused, match="another key"):
        await register_at(client, OTHER, make_identity("n1", key="thief"))
    with pytest.raises(LeaseLost, match="does not wait for") as lost:
        await client.register("n1", make_identity("n1").registration(ME, "0" * 64))
    assert not lost.value.superseded
    await register_at(client, OTHER, "n1")
    with pytest.raises(LeaseLost, match="registered again") as lost:
        await client.heartbeat("n1", Heartbeat(lease_epoch=epoch, instance=ME))
    assert lost.value.superseded
    with pytest.raises(LeaseLost) as lost:
        await client.deregister("n7", Departure(lease_epoch=1, instance=ME))
    assert not lost.value.superseded


async def test_a_model_name_that_cannot_be_one_is_unknown(client: HttpRouteSource) -> None:
    for name in ("", "x" * 201):
        with pytest.raises(UnknownModel):
            await client.open_session(name)


async def test_a_wrong_token_is_told(url: str) -> None:
    async with TrackerClient(url, "join-of-another-mesh") as stranger:
        with pytest.raises(NotAuthorized, match="join token"):
            await stranger.status()


GOOD_BEAT: dict[str, Any] = {"lease_epoch": 1, "instance": ME, "shards": []}
GOOD_SHARD = json.loads(halves()[0].model_dump_json())


def beat(**changes: Any) -> bytes:
    return json.dumps({**GOOD_BEAT, **changes}).encode()


def shard(**changes: Any) -> bytes:
    return beat(shards=[{**GOOD_SHARD, "shard": {**GOOD_SHARD["shard"], **changes}}])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "body"),
        (b"not json", "Invalid JSON"),
        (b"[]", "body"),
        (b"{}", "lease_epoch: Field required"),
        (beat(lease_epoch="1"), "lease_epoch: Input should be a valid integer"),
        (beat(lease_epoch=1.5), "lease_epoch"),
        (beat(lease_epoch=True), "lease_epoch"),
        (beat(lease_epoch=0), "lease_epoch"),
        (beat(instance="xyz"), "instance"),
        (beat(shards={}), "shards"),
        (beat(shards=[7]), "shards.0"),
        (beat(shards=[GOOD_SHARD] * 65), "shards"),
        (beat(shards=[GOOD_SHARD] * 2), "two shards have the same shard_id"),
        (beat(shards=[{**GOOD_SHARD, "worker_key": "00"}]), "shards.0.worker_key"),
        (beat(shards=[{**GOOD_SHARD, "load": {"open_sessions": -1}}]), "shards.0.load.open_sessions"),
        (shard(address="nowhere"), "shards.0.shard.address"),
        (shard(layers={"start": 3, "end": 3}), "layer range 3:3 is empty"),
        (shard(layers={"start": 0, "end": 9}), "layers 0:9 end after the model's last layer"),
        (shard(n_layer="8"), "shards.0.shard.n_layer"),
        (b'{"lease_epoch": ' + b"9" * 5000 + b"}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"\xff\xfe", "JSON"),
    ],
)
async def test_malformed_messages_are_refused_by_field(url: str, client: TrackerClient, body: bytes, told: str) -> None:
    await register_at(client, ME, "n1")
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        answer = await http.post(f"{url}/tracker/v1/nodes/n1/heartbeat", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "bad_request")
    assert told in error["message"]
    assert (await client.status()).nodes[0].shards == ()


async def test_a_malformed_heartbeat_keeps_the_lease(url: str, client: TrackerClient, tracker: Tracker) -> None:
    epoch = await offer(client, *halves())
    (before,) = tracker.registry.nodes()
    reported_s = before.reported_s
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        answer = await http.post(f"{url}/tracker/v1/nodes/n1/heartbeat", content=shard(n_layer="8"))
    assert (answer.status_code, epoch) == (422, 1)
    (node,) = tracker.registry.nodes()
    assert node.reported_s > reported_s
    assert list(node.shards) == ["a", "b"]


async def test_a_heartbeat_is_answered(client: TrackerClient, tracker: Tracker) -> None:
    epoch = await offer(client, *halves())
    foreign = Heartbeat(lease_epoch=1, instance=OTHER, shards=halves())
    await register_at(client, OTHER, "n2")
    told = await client.heartbeat("n2", foreign)
    assert told.not_ready == {"a": "refused: it belongs to node n1", "b": "refused: it belongs to node n1"}
    tracker.registry.assignments = lambda node_id: ()
    assert (await client.heartbeat("n1", Heartbeat(lease_epoch=epoch, instance=ME))).assignments == ()
    status = {node.node_id: node for node in (await client.status()).nodes}
    assert [(one.shard_id, one.ready, one.why_not_ready) for one in status["n2"].shards] == [
        ("a", False, "refused: it belongs to node n1"),
        ("b", False, "refused: it belongs to node n1"),
    ]
    check = await asyncio.to_thread(doctor.check_tracker, client.url, TOKEN)
    assert check.level == doctor.WARN
    assert check.advice.startswith("a is not ready: refused: it belongs to node n1 (and 1 more)")


async def test_unknown_fields_are_ignored(url: str, client: TrackerClient) -> None:
    await register_at(client, ME, "n1")
    newer = {**GOOD_SHARD, "colour": "blue", "shard": {**GOOD_SHARD["shard"], "certified": True}}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        answer = await http.post(f"{url}/tracker/v1/nodes/n1/heartbeat", content=beat(shards=[newer], later={"x": 1}))
    assert answer.status_code == 200
    assert [s.shard_id for s in (await client.status()).nodes[0].shards] == ["a"]


async def test_a_body_without_end_is_cut_off(url: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(2 * MAX_BODY_BYTES // 65536):
            yield b" " * 65536

    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        answer = await http.post(f"{url}/tracker/v1/sessions", content=endless())
    assert answer.status_code == 422
    assert "larger than" in answer.json()["error"]["message"]


@pytest.mark.parametrize("node_id", ["a b", "-x", "x" * 101, "a%2Fb", "%00", "ü"])
async def test_node_ids_are_checked(url: str, tracker: Tracker, node_id: str) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}) as http:
        answer = await http.post(
            f"{url}/tracker/v1/nodes/{node_id}/lease",
            content=make_identity("n1").registration(ME, "0" * 64).model_dump_json(),
        )
    assert answer.status_code in (404, 422)
    assert set(answer.json()["error"]) >= {"code", "message"}
    assert tracker.registry.nodes() == ()


async def test_nobody_listening_is_an_unavailable_tracker() -> None:
    async with TrackerClient("http://127.0.0.1:1", TOKEN) as client:
        with pytest.raises(TrackerUnavailable, match=r"no answer from the tracker at http://127\.0\.0\.1:1"):
            await client.models()


async def test_a_silent_tracker_is_an_unavailable_tracker() -> None:
    gone = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    async with (
        server,
        TrackerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", TOKEN, timeout_s=0.2) as c,
    ):
        with pytest.raises(TrackerUnavailable, match="no answer"):
            await c.models()
        await gone.wait()


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>"), (200, b'{"models": 7}'), (404, b"<html>"), (500, b"{}"), (302, b"")]
)
async def test_something_else_at_the_url_is_an_unavailable_tracker(status: int, body: bytes) -> None:
    async def something_else(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": body})

    async with running(something_else) as at, TrackerClient(at, TOKEN) as client:
        with pytest.raises(TrackerUnavailable):
            await client.models()


@pytest.mark.parametrize("bad", ["", "127.0.0.1:8080", "ftp://x", "http://", "http://[", "mesh"])
def test_a_url_that_is_none_is_a_usage_error(bad: str) -> None:
    with pytest.raises(UsageError, match="URL"):
        TrackerClient(bad, TOKEN)


@asynccontextmanager
async def serving(database: str) -> AsyncIterator[HttpRouteSource]:
    async with (
        Tracker.open(database, SETTINGS) as tracker,
        running(create_app(tracker, TOKEN)) as at,
        HttpRouteSource(at, TOKEN) as client,
    ):
        yield client


async def test_a_restarted_tracker_loses_nothing(tmp_path: Path) -> None:
    database = sqlite_url(tmp_path / "t.sqlite3")
    async with serving(database) as client:
        epoch = await offer(client, *halves())
        session = await client.open_session("tiny")
    async with serving(database) as client:
        status = await client.status()
        assert [(n.node_id, n.state, len(n.shards)) for n in status.nodes] == [("n1", "live", 2)]
        assert status.open_sessions == 1
        # Routes work before the node has reported again, and its old lease is still good.
        assert (await client.open_session("tiny")).route == session.route
        await client.heartbeat("n1", Heartbeat(lease_epoch=epoch, instance=ME, shards=halves()))
        await client.close_session(session.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)
        assert (await client.status()).open_sessions == 1
