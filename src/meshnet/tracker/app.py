"""The tracker's HTTP face, for nodes and for gateways that run apart: ``/tracker/v1/…``, join token as Bearer.

Errors are ``{"error": {"code": …, "message": …}}``; the codes are those of `faults.FAULTS`. Heartbeats,
and opening and ending of sessions, are answered by `HotCalls`, in front of all this. Beside it, at the root, what
BitTorrent clients call: ``/announce/KEY`` and ``/scrape/KEY``.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from meshnet.core import Noun
from meshnet.errors import MeshnetError, NotAuthorized
from meshnet.tracker.announce import AnnounceFace
from meshnet.tracker.auth import bearer_is
from meshnet.tracker.faults import error_body, fault_of
from meshnet.tracker.hot_calls import HotCalls
from meshnet.tracker.ledger import summarize
from meshnet.tracker.ledger_query import LedgerQuery
from meshnet.tracker.messages import (
    NODE_ID,
    PREFIX,
    Departure,
    Registration,
    RenewSessions,
    RepairSession,
    ServedModels,
    UnknownSessions,
    parse,
)
from meshnet.tracker.publication import MAX_PUBLICATION_BYTES, Publication
from meshnet.tracker.request_body import BODY_TIMEOUT_S, MAX_BODY_BYTES, read_body
from meshnet.tracker.tracker import Tracker

#: A published artifact may be much larger than any other message, and take so long.
PUBLICATION_TIMEOUT_S = 300.0

NodeId = Annotated[str, Path(pattern=NODE_ID)]
DigestPath = Annotated[str, Path(pattern=r"^sha256:[0-9a-f]{64}$")]
WantedPath = Annotated[str, Path(max_length=200)]
SessionIdPath = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]


def create_app(tracker: Tracker, join_token: str) -> HotCalls:
    """The ASGI application over a running tracker. It does not own the tracker."""
    return HotCalls(other_calls(tracker, join_token), tracker=tracker, join_token=join_token)


def other_calls(tracker: Tracker, join_token: str) -> FastAPI:
    """All calls but the hot ones."""
    app = FastAPI(title="Meshnet tracker", openapi_url=None, docs_url=None, redoc_url=None)

    async def authorized(request: Request) -> None:
        if not bearer_is(request.headers.get("authorization"), join_token):
            raise NotAuthorized("wrong or missing join token; pass the one that `meshnet serve` printed")

    guarded = [Depends(authorized)]

    @app.post(PREFIX + "/nodes/{node_id}/challenge", dependencies=guarded)
    async def challenge(node_id: NodeId) -> Response:
        return _json(tracker.registry.challenge(node_id))

    @app.post(PREFIX + "/nodes/{node_id}/lease", dependencies=guarded)
    async def register(node_id: NodeId, request: Request) -> Response:
        return _json(await tracker.registry.register(node_id, parse(Registration, await _body(request))))

    @app.post(PREFIX + "/nodes/{node_id}/departure", dependencies=guarded)
    async def depart(node_id: NodeId, request: Request) -> Response:
        await tracker.registry.deregister(node_id, parse(Departure, await _body(request)))
        return Response(status_code=204)

    @app.get(PREFIX + "/models", dependencies=guarded)
    async def models() -> Response:
        return _json(ServedModels(models=tuple(await tracker.sessions.models())))

    # Before the calls of one session; "renew" is no id.
    @app.post(PREFIX + "/sessions/renew", dependencies=guarded)
    async def renew_sessions(request: Request) -> Response:
        wanted = parse(RenewSessions, await _body(request))
        return _json(UnknownSessions(session_ids=tuple(await tracker.sessions.renew_sessions(wanted.session_ids))))

    @app.post(PREFIX + "/sessions/{session_id}/repair", dependencies=guarded)
    async def repair_session(session_id: SessionIdPath, request: Request) -> Response:
        broken = parse(RepairSession, await _body(request))
        return _json(
            await tracker.sessions.repair_session(
                session_id, epoch=broken.epoch, lost_shards=broken.lost_shards, continuing=broken.continuing
            )
        )

    # One at a time: reading a large one takes many times its size in memory.
    reading = asyncio.Lock()

    @app.put(PREFIX + "/artifacts/{digest}", dependencies=guarded)
    async def publish(digest: DigestPath, request: Request) -> Response:
        body = await _body(request, MAX_PUBLICATION_BYTES, PUBLICATION_TIMEOUT_S)
        async with reading:
            bundle = await asyncio.to_thread(lambda: Publication.parse(body).bundle(digest))
        return _json(await tracker.artifacts.publish(bundle))

    @app.get(PREFIX + "/artifacts", dependencies=guarded)
    async def published() -> Response:
        return _json(tracker.published())

    @app.get(PREFIX + "/artifacts/{wanted}", dependencies=guarded)
    async def artifact(wanted: WantedPath) -> Response:
        return Response((await tracker.artifacts.get(wanted)).to_json(), media_type="application/json")

    @app.get(PREFIX + "/ledger", dependencies=guarded)
    async def ledger(by: str = "node", since: str | None = None, until: str | None = None) -> Response:
        query = LedgerQuery.parse(by, since, until, now_unix_s=int(time.time()))
        return _json(await summarize(tracker.database, query))

    @app.get(PREFIX + "/status", dependencies=guarded)
    async def status() -> Response:
        return _json(await tracker.status())

    announces = AnnounceFace(tracker.artifacts, tracker.peers, tracker.settings, join_token)

    # Not under the prefix: libtorrent talks to a tracker on loopback only at paths that begin like this.
    @app.get("/announce/{key}")
    async def announce(key: str, request: Request) -> Response:
        connected_from = request.client.host if request.client else None
        return _bencoded(announces.announce(key, request.scope["query_string"], connected_from))

    @app.get("/scrape/{key}")
    async def scrape(key: str, request: Request) -> Response:
        return _bencoded(announces.scrape(key, request.scope["query_string"]))

    app.add_exception_handler(MeshnetError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_bad_path)
    app.add_exception_handler(StarletteHTTPException, _on_http_error)
    return app


async def _body(request: Request, max_bytes: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    return await read_body(request.receive, max_bytes, timeout_s)


def _json(answer: Noun) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _bencoded(answer: bytes) -> Response:
    return Response(answer, media_type="text/plain")


def _error(status: int, code: str, error: Exception | str) -> Response:
    return Response(error_body(code, error), status, media_type="application/json")


async def _on_error(_: Request, error: Exception) -> Response:
    fault = fault_of(error) if isinstance(error, MeshnetError) else None
    if fault is None:
        raise error
    return _error(fault.status, fault.code, error)


async def _on_bad_path(_: Request, error: Exception) -> Response:
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    told = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in faults)
    return _error(422, "bad_request", told or str(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, StarletteHTTPException) else 500
    return _error(status, "http_error", f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}")
