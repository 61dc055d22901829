"""The tracker's HTTP face, for nodes and for gateways that run apart: ``/tracker/v1/…``, join token as Bearer.

Errors are ``{"error": {"code": …, "message": …}}``; the codes are those of `FAULTS`. Beside it, at the root, what
BitTorrent clients call: ``/announce/KEY`` and ``/scrape/KEY``.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from meshnet.core import Noun
from meshnet.errors import (
    ArtifactError,
    IdentityRefused,
    LeaseLost,
    MeshnetError,
    NoRoute,
    NotAuthorized,
    RequestError,
    SessionLost,
    TrackerUnavailable,
    UnknownArtifact,
    UnknownModel,
)
from meshnet.tracker.announce import AnnounceFace
from meshnet.tracker.auth import bearer_is
from meshnet.tracker.ledger import summarize
from meshnet.tracker.ledger_query import LedgerQuery
from meshnet.tracker.messages import (
    NODE_ID,
    PREFIX,
    Departure,
    Heartbeat,
    OpenSession,
    Pulse,
    Registration,
    RenewSessions,
    RepairSession,
    ServedModels,
    SessionEnd,
    UnknownSessions,
    parse,
)
from meshnet.tracker.publication import MAX_PUBLICATION_BYTES, Publication
from meshnet.tracker.tracker import Tracker

#: Most bytes of a request body: 64 shards with large boundary schemas stay far below.
MAX_BODY_BYTES = 2 << 20

#: A published artifact may be much larger than any other message, and take so long.
PUBLICATION_TIMEOUT_S = 300.0

#: A body that takes longer is refused, so that nobody holds connections for nothing.
BODY_TIMEOUT_S = 30.0

NodeId = Annotated[str, Path(pattern=NODE_ID)]
DigestPath = Annotated[str, Path(pattern=r"^sha256:[0-9a-f]{64}$")]
WantedPath = Annotated[str, Path(max_length=200)]
SessionIdPath = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class Fault:
    """How an exception travels: HTTP status and code."""

    kind: type[MeshnetError]
    status: int
    code: str


#: The first that fits wins, so subclasses stand before their bases.
FAULTS = (
    Fault(NotAuthorized, 401, "not_authorized"),
    Fault(UnknownModel, 404, "unknown_model"),
    Fault(UnknownArtifact, 404, "unknown_artifact"),
    Fault(RequestError, 422, "bad_request"),
    Fault(ArtifactError, 422, "bad_artifact"),
    Fault(NoRoute, 503, "no_route"),
    Fault(LeaseLost, 409, "lease_lost"),
    Fault(SessionLost, 409, "session_lost"),
    Fault(IdentityRefused, 403, "identity_refused"),
    Fault(TrackerUnavailable, 503, "tracker_unavailable"),
)


def create_app(tracker: Tracker, join_token: str) -> FastAPI:
    """The ASGI application over a running tracker. It does not own the tracker."""
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

    @app.post(PREFIX + "/nodes/{node_id}/heartbeat", dependencies=guarded)
    async def heartbeat(node_id: NodeId, request: Request) -> Response:
        body = await _body(request)
        try:
            beat = parse(Heartbeat, body)
        except RequestError:
            # Whatever is wrong with it, the node is there: that must not cost it its lease.
            with suppress(RequestError, LeaseLost):
                pulse = parse(Pulse, body)
                await tracker.registry.renew(node_id, pulse.lease_epoch, pulse.instance)
            raise
        return _json(await tracker.registry.heartbeat(node_id, beat))

    @app.post(PREFIX + "/nodes/{node_id}/departure", dependencies=guarded)
    async def depart(node_id: NodeId, request: Request) -> Response:
        await tracker.registry.deregister(node_id, parse(Departure, await _body(request)))
        return Response(status_code=204)

    @app.get(PREFIX + "/models", dependencies=guarded)
    async def models() -> Response:
        return _json(ServedModels(models=tuple(await tracker.sessions.models())))

    @app.post(PREFIX + "/sessions", dependencies=guarded)
    async def open_session(request: Request) -> Response:
        wanted = parse(OpenSession, await _body(request))
        return _json(
            await tracker.sessions.open_session(
                wanted.model,
                avoid_shards=wanted.avoid_shards,
                prompt_tokens=wanted.prompt_tokens,
                answer_tokens=wanted.answer_tokens,
            )
        )

    # Before the calls of one session; "renew" is no id.
    @app.post(PREFIX + "/sessions/renew", dependencies=guarded)
    async def renew_sessions(request: Request) -> Response:
        wanted = parse(RenewSessions, await _body(request))
        return _json(UnknownSessions(session_ids=tuple(await tracker.sessions.renew_sessions(wanted.session_ids))))

    @app.post(PREFIX + "/sessions/{session_id}/repair", dependencies=guarded)
    async def repair_session(session_id: SessionIdPath, request: Request) -> Response:
        broken = parse(RepairSession, await _body(request))
        return _json(
            await tracker.sessions.repair_session(session_id, epoch=broken.epoch, lost_shards=broken.lost_shards)
        )

    @app.post(PREFIX + "/sessions/{session_id}/end", dependencies=guarded)
    async def close_session(session_id: SessionIdPath, request: Request) -> Response:
        end = parse(SessionEnd, await _body(request))
        await tracker.sessions.close_session(
            session_id, finish_cause=end.finish_cause, generated_tokens=end.generated_tokens, work=end.work
        )
        return Response(status_code=204)

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
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise RequestError(f"the body is larger than {max_bytes} bytes")
    except TimeoutError as error:
        raise RequestError(f"the body was not complete after {timeout_s:g} s") from error
    return bytes(body)


def _json(answer: Noun) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _bencoded(answer: bytes) -> Response:
    return Response(answer, media_type="text/plain")


def _error(status: int, code: str, message: str, **details: object) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message, **details}}, status_code=status)


async def _on_error(_: Request, error: Exception) -> Response:
    fault = next((fault for fault in FAULTS if isinstance(error, fault.kind)), None)
    if fault is None:
        raise error
    details: dict[str, object] = {}
    if isinstance(error, LeaseLost):
        details["superseded"] = error.superseded
    if isinstance(error, RequestError):
        details["param"] = error.param
    return _error(fault.status, fault.code, str(error), **details)


async def _on_bad_path(_: Request, error: Exception) -> Response:
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    told = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in faults)
    return _error(422, "bad_request", told or str(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, StarletteHTTPException) else 500
    return _error(status, "http_error", f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}")
