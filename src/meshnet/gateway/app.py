"""The gateway's HTTP face: the OpenAI-compatible API, ``/health`` and ``/metrics``."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshnet.core import RouteSource, ServedModel
from meshnet.errors import MeshnetError, NotAuthorized, UnknownModel, for_the_log
from meshnet.gateway.answers import complete, stream
from meshnet.gateway.failures import BodyTooLarge, BodyTooSlow, Failure, failure_of
from meshnet.gateway.generations import Generations
from meshnet.gateway.metrics import GatewayMetrics
from meshnet.gateway.responses import ModelCard, ModelList
from meshnet.gateway.schemas import ChatRequest, CompletionRequest, parse_request
from meshnet.gateway.settings import GatewaySettings
from meshnet.gateway.sse import EventStream
from meshnet.gateway.watch import ClientGone, client_leaves, run_watched

_log = logging.getLogger(__name__)

VERSION = version("meshnet")

#: Nobody reads this status; it is for the metrics.
CLIENT_CLOSED_REQUEST = 499


def create_app(route_source: RouteSource, settings: GatewaySettings) -> FastAPI:
    """The gateway as an ASGI application.

    Its lifespan closes the connections to workers; where another application mounts it, that one awaits
    ``app.state.generations.close()`` itself. Metrics are at ``app.state.metrics``.
    """
    metrics = GatewayMetrics()
    generations = Generations(route_source, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await generations.close()

    # Without the generated pages: bodies are validated by schemas.py, and docs/api.md documents them.
    app = FastAPI(
        title="Meshnet gateway",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.generations = generations
    app.state.metrics = metrics
    app.include_router(_api(route_source, generations, settings), dependencies=[Depends(_Authorize(settings))])
    app.include_router(_operations(metrics, settings))
    _answer_errors(app, metrics)
    app.add_middleware(_CountRequests, metrics=metrics)
    return app


def _api(routes: RouteSource, generations: Generations, settings: GatewaySettings) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, parse_request(ChatRequest, await _read_body(request, settings)))

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, parse_request(CompletionRequest, await _read_body(request, settings)))

    async def answer(request: Request, wanted: ChatRequest | CompletionRequest) -> Response:
        if wanted.stream:
            return EventStream(
                stream(generations, wanted),
                keepalive_s=settings.keepalive_s,
                stall_timeout_s=settings.stall_timeout_s,
                on_error=lambda error: _failure(error, generations.metrics),
            )
        whole = await run_watched(complete(generations, wanted), client_leaves(request.receive))
        return Response(whole.to_json(), media_type="application/json")

    @router.get("/models")
    async def models() -> ModelList:
        return ModelList(object="list", data=[_card(model) for model in await routes.models()])

    @router.get("/models/{name:path}")
    async def model(name: str) -> ModelCard:
        for served in await routes.models():
            if served.model == name:
                return _card(served)
        raise UnknownModel(f"no model '{name}' is served now; GET /v1/models lists those that are")

    return router


def _operations(metrics: GatewayMetrics, settings: GatewaySettings) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": VERSION}

    guard = [Depends(_Authorize(settings))] if settings.metrics_require_api_key else []

    @router.get("/metrics", dependencies=guard)
    async def render_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


class _Authorize:
    """Lets a request pass that carries one of the API keys."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._required = settings.require_api_key
        # Digests are of one length, so that comparing them takes the same time whatever is wrong with a key.
        self._digests = [_digest(key) for key in settings.api_keys]

    async def __call__(self, request: Request) -> None:
        if not self._required:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        known = [hmac.compare_digest(digest, other) for other in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise NotAuthorized("missing or wrong API key; send it as 'Authorization: Bearer <key>'")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _read_body(request: Request, settings: GatewaySettings) -> bytes:
    limit_bytes = settings.max_body_bytes
    too_large = BodyTooLarge(f"the request body is larger than {limit_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limit_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BodyTooSlow(f"the request body was not complete after {settings.body_timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise ClientGone("the client closed its connection before its request was complete") from error
    return bytes(body)


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.model,
        object="model",
        created=model.created_unix_s,
        owned_by="meshnet",
        meshnet={
            "artifact": model.artifact_digest,
            "architecture": model.architecture,
            "session_capacity_tokens": model.session_capacity_tokens,
        },
    )


def _answer_errors(app: FastAPI, metrics: GatewayMetrics) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        return _failure(error, metrics).response()

    async def on_client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code, message = {
            404: ("not_found", f"there is no {request.url.path}; the API is under /v1"),
            405: ("method_not_allowed", f"{request.method} is not allowed on {request.url.path}"),
        }.get(status, ("invalid_request", str(getattr(error, "detail", ""))))
        metrics.errors.labels(code).inc()
        response = Failure(status, "invalid_request_error", code, message).response()
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    app.add_exception_handler(MeshnetError, on_error)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_error)


def _failure(error: Exception, metrics: GatewayMetrics) -> Failure:
    """What the client is told; counted, and logged if the client is not to blame."""
    failure = failure_of(error)
    metrics.errors.labels(failure.code).inc()
    if failure.status >= 500:
        # What is raised on purpose needs no traceback.
        _log.error(
            "%s: %s", failure.code, for_the_log(error), exc_info=None if isinstance(error, MeshnetError) else error
        )
    return failure


class _CountRequests:
    """ASGI middleware: counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            route: Any = scope.get("route")
            self._metrics.requests.labels(getattr(route, "path", "other"), str(status)).inc()
