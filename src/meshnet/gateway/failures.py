"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}`` with the right status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from meshnet.core import Telemetry
from meshnet.errors import (
    BadParameter,
    DeadlineExceeded,
    HopLost,
    HopRefused,
    MeshnetError,
    NoRoute,
    NotAuthorized,
    Overloaded,
    PromptTooLong,
    RequestError,
    TrackerUnavailable,
    UnknownModel,
)
from meshnet.rpc.client import refusal_name
from meshnet.rpc.generated import shard_pb2 as pb


class BodyTooLarge(RequestError):
    """The request body is over the gateway's limit."""


class BodyTooSlow(RequestError):
    """The request body did not come in time."""


@dataclass(frozen=True)
class Failure:
    """An error as the client sees it. ``telemetry`` is there if a generation was under way."""

    status: int
    kind: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    hop: dict[str, Any] | None = None
    telemetry: Telemetry | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body; telemetry is under ``meshnet``."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.hop is not None:
            error["hop"] = self.hop
        body: dict[str, Any] = {"error": error}
        if self.telemetry is not None:
            body["meshnet"] = self.telemetry.model_dump(mode="json")
        return body

    def event(self) -> bytes:
        """The body as data of a server-sent event."""
        return json.dumps(self.body(), ensure_ascii=False).encode()

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


class AnswerFailed(MeshnetError):
    """An answer broke off while it was generated; ``failure`` has what the client is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_INVALID = "invalid_request_error"
_SERVER = "server_error"

# Most specific first.
KINDS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (UnknownModel, 404, _INVALID, "model_not_found"),
    (PromptTooLong, 400, _INVALID, "context_length_exceeded"),
    (BodyTooLarge, 413, _INVALID, "body_too_large"),
    (BodyTooSlow, 408, _INVALID, "body_too_slow"),
    (BadParameter, 400, _INVALID, "invalid_parameter"),
    (RequestError, 400, _INVALID, "invalid_request"),
    (NotAuthorized, 401, _INVALID, "invalid_api_key"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (NoRoute, 503, _SERVER, "no_route"),
    (HopLost, 502, _SERVER, "hop_lost"),
    (HopRefused, 502, _SERVER, "hop_refused"),
    (DeadlineExceeded, 504, _SERVER, "deadline_exceeded"),
    (TrackerUnavailable, 503, _SERVER, "tracker_unavailable"),
)


def failure_of(error: Exception) -> Failure:
    """How to tell a client about ``error``. An unforeseen error gives nothing of itself away."""
    if isinstance(error, AnswerFailed):
        return error.failure
    if isinstance(error, HopRefused) and error.refusal == refusal_name(pb.REFUSAL_NO_CAPACITY):
        overloaded = Overloaded(f"the route is full; try again later ({error})")
        overloaded.__cause__ = error
        error = overloaded
    for kind, status, name, code in KINDS:
        if isinstance(error, kind):
            return Failure(
                status=status,
                kind=name,
                code=code,
                message=str(error),
                param="model" if isinstance(error, UnknownModel) else getattr(error, "param", None),
                retry_after_s=_retry_after_s(error),
                hop=_hop(error),
            )
    return Failure(500, _SERVER, "internal_error", "the gateway failed; its log has the reason")


def _retry_after_s(error: Exception) -> int | None:
    if isinstance(error, Overloaded):
        return max(1, error.retry_after_s)
    return 1 if isinstance(error, NoRoute | TrackerUnavailable) else None


def _hop(error: Exception) -> dict[str, Any] | None:
    if isinstance(error, HopLost):
        return {"shard": error.shard_id, "index": error.hop_index}
    if isinstance(error, HopRefused):
        return {"shard": error.shard_id, "refusal": error.refusal}
    return None
