"""The calls that come by the thousand, answered in front of the application that has all of them.

A framework's way from a request to a function costs several times what a heartbeat itself does. So heartbeats, and
opening and ending of sessions, are read and answered here; everything else goes on to the application behind. A person
waits for a session to be opened; the others give way to that.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect

from meshnet.core import Noun
from meshnet.errors import LeaseLost, MeshnetError, NotAuthorized, RequestError
from meshnet.tracker.auth import bearer_is
from meshnet.tracker.faults import error_body, fault_of
from meshnet.tracker.messages import PREFIX, Heartbeat, OpenSession, Pulse, SessionEnd, parse
from meshnet.tracker.request_body import read_body
from meshnet.tracker.tracker import Tracker
from meshnet.tracker.turns import Turns

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Takes what its path names, and the body.
_Call = Callable[[str, bytes], Awaitable[Noun | None]]


#: Of the calls answered here, all of them POST.
HOT_PATHS = (
    PREFIX + "/nodes/{node_id}/heartbeat",
    PREFIX + "/sessions",
    PREFIX + "/sessions/{session_id}/end",
)
_NAMED = re.compile(r"\{(\w+)\}")
_NAMES = {"node_id": r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})", "session_id": r"([0-9a-f]{32})"}


class HotCalls:
    """ASGI middleware over the tracker's application."""

    def __init__(self, app: Application, *, tracker: Tracker, join_token: str) -> None:
        self._app = app
        self._tracker = tracker
        self._join_token = join_token
        self._turns = Turns()
        calls = (self._heartbeat, self._open_session, self._close_session)
        self._calls: list[tuple[re.Pattern[str], _Call]] = [
            (re.compile(_NAMED.sub(lambda name: _NAMES[name[1]], path)), call)
            for path, call in zip(HOT_PATHS, calls, strict=True)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            for pattern, call in self._calls:
                found = pattern.fullmatch(scope["path"])
                if found is not None:
                    await self._answer(call, found[found.lastindex or 0], scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _answer(self, call: _Call, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not bearer_is(_header(scope, b"authorization"), self._join_token):
                raise NotAuthorized("wrong or missing join token; pass the one that `meshnet serve` printed")
            answer = await call(name, await read_body(receive))
        except MeshnetError as error:
            fault = fault_of(error)
            if fault is None:
                raise
            await _send(send, fault.status, error_body(fault.code, error))
            return
        except ClientDisconnect:
            return  # nobody is there to be answered
        await _send(send, 204 if answer is None else 200, b"" if answer is None else answer.model_dump_json().encode())

    async def _heartbeat(self, node_id: str, body: bytes) -> Noun:
        registry = self._tracker.registry
        await self._turns.wait()
        try:
            beat = parse(Heartbeat, body)
        except RequestError:
            # Whatever is wrong with it, the node is there: that must not cost it its lease.
            with suppress(RequestError, LeaseLost):
                pulse = parse(Pulse, body)
                await registry.renew(node_id, pulse.lease_epoch, pulse.instance)
            raise
        return await registry.heartbeat(node_id, beat)

    async def _open_session(self, _: str, body: bytes) -> Noun:
        wanted = parse(OpenSession, body)
        return await self._tracker.sessions.open_session(
            wanted.model,
            avoid_shards=wanted.avoid_shards,
            prompt_tokens=wanted.prompt_tokens,
            answer_tokens=wanted.answer_tokens,
            continuing=wanted.continuing,
        )

    async def _close_session(self, session_id: str, body: bytes) -> None:
        await self._turns.wait()
        end = parse(SessionEnd, body)
        await self._tracker.sessions.close_session(
            session_id, finish_cause=end.finish_cause, generated_tokens=end.generated_tokens, work=end.work
        )


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def _send(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    if body:
        headers.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
