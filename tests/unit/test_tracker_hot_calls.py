"""Calls answered in front of the application, over a real server: what goes wrong within them ends with an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from meshnet.core import RouteSession
from meshnet.errors import MeshnetError
from meshnet.tracker.app import create_app
from meshnet.tracker.hot_calls import HOT_PATHS
from meshnet.tracker.tracker import Tracker
from tests.support.http import running

JOIN_TOKEN = "join-3b1f"
HEADERS = {"authorization": f"Bearer {JOIN_TOKEN}"}
SESSIONS = "/tracker/v1/sessions"
STATUS = "/tracker/v1/status"


@pytest.fixture
async def tracker(tmp_path: Path) -> AsyncIterator[Tracker]:
    async with Tracker.open(f"sqlite+aiosqlite:///{tmp_path / 't.sqlite3'}") as tracker:
        yield tracker


@pytest.fixture
async def http(tracker: Tracker) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running(create_app(tracker, JOIN_TOKEN)) as url,
        httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=10) as client,
    ):
        yield client


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), KeyError("shard"), MeshnetError("of no known kind")])
async def test_a_mistake_of_the_tracker_is_answered_and_the_server_goes_on(
    tracker: Tracker,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    async def mistaken(*_: object, **__: object) -> RouteSession:
        raise error

    monkeypatch.setattr(tracker.sessions, "open_session", mistaken)
    for _ in range(2):
        with caplog.at_level(logging.ERROR):
            answer = await http.post(SESSIONS, json={"model": "tiny"})
        assert answer.status_code == 500
        # Nothing of it is told to others, all of it to whoever reads the log.
        assert str(error) not in answer.text
        assert type(error).__name__ in caplog.text
    assert (await http.get(STATUS)).status_code == 200
    monkeypatch.undo()
    assert (await http.post(SESSIONS, json={"model": "tiny"})).status_code == 404


@pytest.mark.parametrize("path", HOT_PATHS)
async def test_nobody_gets_in_without_the_token(http: httpx.AsyncClient, path: str) -> None:
    where = path.format(node_id="n1", session_id="0" * 32)
    for header in ("", "Bearer", "Bearer wrong", "Basic x", "Bearer \xff\xfe", JOIN_TOKEN):
        answer = await http.post(where, content=b"{}", headers={b"authorization": header.encode("latin-1")})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "not_authorized"), header
    request = http.build_request("POST", where, content=b"{}")
    del request.headers["authorization"]
    assert (await http.send(request)).status_code == 401


NONSENSE = (b"", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"model": ' * 5000, b" " * (3 << 20))


@pytest.mark.parametrize("path", HOT_PATHS)
async def test_nonsense_is_told_so(http: httpx.AsyncClient, path: str) -> None:
    for body in NONSENSE:
        answer = await http.post(path.format(node_id="n1", session_id="0" * 32), content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_request"), body[:20]
    assert (await http.get(STATUS)).status_code == 200


async def test_names_that_are_none_are_no_calls(http: httpx.AsyncClient) -> None:
    for path in (
        "/tracker/v1/nodes/-n/heartbeat",
        f"/tracker/v1/nodes/{'n' * 101}/heartbeat",
        "/tracker/v1/nodes/n1%0a/heartbeat",
        "/tracker/v1/nodes/n1/n2/heartbeat",
        f"/tracker/v1/sessions/{'g' * 32}/end",
        f"/tracker/v1/sessions/{'0' * 32}/end/",
        "/tracker/v1/sessions//end",
    ):
        answer = await http.post(path, content=b"{}")
        assert 400 <= answer.status_code < 500, path
        assert "error" in answer.json(), path


async def test_other_methods_go_to_the_application(http: httpx.AsyncClient) -> None:
    for method in ("GET", "PUT", "HEAD", "OPTIONS"):
        assert (await http.request(method, SESSIONS)).status_code in (404, 405)


async def test_a_client_that_goes_away_in_its_body_leaves_no_trace(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    head = f"POST {SESSIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {JOIN_TOKEN}\r\nContent-Length: 99\r\n\r\n"
    writer.write(head.encode() + b'{"mod')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await http.get(STATUS)).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_one_connection_carries_many_calls(http: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    try:
        for _ in range(3):
            body = b'{"model": "tiny"}'
            head = f"POST {SESSIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {JOIN_TOKEN}\r\n"
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert told.startswith(b"HTTP/1.1 404")
            length = next(line for line in told.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
    finally:
        writer.close()
