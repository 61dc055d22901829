"""How the tracker's errors travel: HTTP status, and ``{"error": {"code": …, "message": …}}``."""

from __future__ import annotations

import json
from dataclasses import dataclass

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


def fault_of(error: MeshnetError) -> Fault | None:
    """None if it is none of those that the tracker raises on purpose."""
    return next((fault for fault in FAULTS if isinstance(error, fault.kind)), None)


def error_body(code: str, error: Exception | str) -> bytes:
    """The JSON body, with what further the error tells."""
    told: dict[str, object] = {"code": code, "message": str(error)}
    if isinstance(error, LeaseLost):
        told["superseded"] = error.superseded
    if isinstance(error, RequestError):
        told["param"] = error.param
    return json.dumps({"error": told}, ensure_ascii=False).encode()
