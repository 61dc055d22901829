"""The tracker over HTTP: `TrackerClient` for nodes and the command line, `HttpRouteSource` for a gateway alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import httpx
from pydantic import ValidationError

from meshnet.artifact.bundle import Bundle
from meshnet.core import Continuation, FinishCause, HopWork, Noun, RouteSession, ServedModel
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
    UsageError,
)
from meshnet.tracker.messages import (
    MAX_RENEWED,
    PREFIX,
    Challenge,
    Departure,
    Heartbeat,
    HeartbeatAnswer,
    Lease,
    LedgerSummary,
    N,
    OpenSession,
    PublishedArtifact,
    PublishedArtifacts,
    Registration,
    RenewSessions,
    RepairSession,
    ServedModels,
    SessionEnd,
    TrackerStatus,
    UnknownSessions,
)
from meshnet.tracker.publication import Publication, choose, whole_digest

#: Connecting and answering; the tracker does no long work in a request.
DEFAULT_TIMEOUT_S = 5.0
#: Save for artifacts: megabytes over slow lines, checked by the tracker when they are complete.
ARTIFACT_TIMEOUT_S = 120.0


class TrackerClient:
    """One tracker at ``url`` (for example ``http://192.0.2.1:8080``). Use as an async context manager, or ``close``.

    Every call raises ``TrackerUnavailable`` if no tracker answers, ``NotAuthorized`` if it does not know the join
    token, ``RequestError`` if it refuses the message; calls name what else they raise.
    """

    def __init__(self, url: str, join_token: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.url = base_url(url)
        if not join_token.isascii() or not join_token.isprintable():
            raise UsageError("the join token holds characters that no token has; copy the one `meshnet serve` printed")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {join_token}"},
            timeout=timeout_s,
            # Trackers are addressed directly, whatever proxy the environment names.
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def challenge(self, node_id: str) -> Challenge:
        """What to sign in order to register."""
        return _read(Challenge, await self._call("POST", f"/nodes/{node_id}/challenge"))

    async def register(self, node_id: str, registration: Registration) -> Lease:
        """Raises ``IdentityRefused``, or ``LeaseLost`` if the challenge is too old."""
        return _read(Lease, await self._call("POST", f"/nodes/{node_id}/lease", registration))

    async def heartbeat(self, node_id: str, beat: Heartbeat) -> HeartbeatAnswer:
        """What the tracker wants of the node. Raises ``LeaseLost`` if the lease has ended."""
        answer = await self._call("POST", f"/nodes/{node_id}/heartbeat", beat)
        # An older tracker has nothing to say.
        return _read(HeartbeatAnswer, answer) if answer else HeartbeatAnswer()

    async def deregister(self, node_id: str, departure: Departure) -> None:
        """Raises ``LeaseLost`` if the lease has ended already."""
        await self._call("POST", f"/nodes/{node_id}/departure", departure)

    async def status(self) -> TrackerStatus:
        return _read(TrackerStatus, await self._call("GET", "/status"))

    async def models(self) -> Sequence[ServedModel]:
        return _read(ServedModels, await self._call("GET", "/models")).models

    async def open_session(
        self,
        model: str,
        *,
        avoid_shards: Sequence[str] = (),
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
        continuing: Continuation | None = None,
    ) -> RouteSession:
        """Raises ``UnknownModel`` or ``NoRoute``."""
        try:
            wanted = OpenSession(
                model=model,
                avoid_shards=tuple(avoid_shards),
                prompt_tokens=prompt_tokens,
                answer_tokens=answer_tokens,
                continuing=continuing,
            )
        except ValidationError:
            raise UnknownModel(f"model {model[:200]!r} is not known", param="model") from None
        return _read(RouteSession, await self._call("POST", "/sessions", wanted))

    async def repair_session(
        self, session_id: str, *, epoch: int, lost_shards: Sequence[str], continuing: Continuation | None = None
    ) -> RouteSession:
        """Raises ``NoRoute`` or ``SessionLost``."""
        broken = RepairSession(epoch=epoch, lost_shards=tuple(lost_shards), continuing=continuing)
        return _read(RouteSession, await self._call("POST", f"/sessions/{session_id}/repair", broken))

    async def renew_sessions(self, session_ids: Sequence[str]) -> Sequence[str]:
        unknown: list[str] = []
        for start in range(0, len(session_ids), MAX_RENEWED):
            wanted = RenewSessions(session_ids=tuple(session_ids[start : start + MAX_RENEWED]))
            unknown += _read(UnknownSessions, await self._call("POST", "/sessions/renew", wanted)).session_ids
        return tuple(unknown)

    async def close_session(
        self, session_id: str, *, finish_cause: FinishCause, generated_tokens: int, work: Sequence[HopWork] = ()
    ) -> None:
        end = SessionEnd(finish_cause=finish_cause, generated_tokens=generated_tokens, work=tuple(work))
        await self._call("POST", f"/sessions/{session_id}/end", end)

    async def ledger(self, *, by: str = "node", since: str | None = None, until: str | None = None) -> LedgerSummary:
        """What nodes have done; the parameters are those of `LedgerQuery.parse`."""
        asked = {"by": by, "since": since, "until": until}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return _read(LedgerSummary, await self._call("GET", f"/ledger?{query}"))

    async def publish(self, bundle: Bundle) -> PublishedArtifact:
        """Make an artifact known to all nodes, in place of an earlier publication of the same digest.

        Raises ``ArtifactError`` if the tracker does not find it consistent.
        """
        body = await asyncio.to_thread(lambda: Publication.of(bundle).to_json())
        answer = await self._call("PUT", f"/artifacts/{bundle.digest}", body, timeout_s=ARTIFACT_TIMEOUT_S)
        return _read(PublishedArtifact, answer)

    async def artifacts(self) -> Sequence[PublishedArtifact]:
        """What has been published, and how many peers each has now."""
        answer = await self._call("GET", "/artifacts", timeout_s=ARTIFACT_TIMEOUT_S)
        return _read(PublishedArtifacts, answer).artifacts

    async def artifact(self, wanted: str) -> Bundle:
        """The manifest and torrent of an artifact: by digest, its first 8 digits or more, or name.

        Raises ``UnknownArtifact`` if none fits, ``ArtifactError`` if several fit or what the tracker hands out is not
        the artifact that was asked for.
        """
        digest = whole_digest(wanted) or choose(wanted, await self.artifacts()).digest
        answer = await self._call("GET", f"/artifacts/{digest}", timeout_s=ARTIFACT_TIMEOUT_S)
        try:
            return await asyncio.to_thread(lambda: Publication.parse(answer).bundle(digest))
        except (ArtifactError, RequestError) as error:
            raise ArtifactError(f"the tracker at {self.url} hands out something else as {digest}: {error}") from error

    async def _call(
        self, method: str, path: str, message: Noun | bytes | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        content = message.model_dump_json() if isinstance(message, Noun) else message
        timeout = self._http.timeout if timeout_s is None else httpx.Timeout(timeout_s, connect=DEFAULT_TIMEOUT_S)
        try:
            answer = await self._http.request(method, PREFIX + path, content=content, timeout=timeout)
        except httpx.HTTPError as error:
            raise TrackerUnavailable(
                f"no answer from the tracker at {self.url} ({_cause(error)}); is `meshnet serve` running there?"
            ) from error
        if answer.is_success:
            return answer.content
        raise _error_from(answer, self.url)


class HttpRouteSource(TrackerClient):
    """``core.RouteSource`` for a gateway that runs apart from its tracker."""


def base_url(url: str) -> str:
    """``url`` without a slash at its end.

    Raises:
        UsageError: not an http(s) URL with a host.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # read here, because it is only checked when read
    except ValueError as error:
        raise UsageError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not a URL of a tracker or gateway; write http://HOST:PORT")
    return url.rstrip("/")


def _read(model: type[N], content: bytes) -> N:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise TrackerUnavailable(
            f"the tracker's answer is not a {model.__name__} ({error.error_count()} faults); "
            "is it another version of Meshnet?"
        ) from error


def _cause(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _error_from(answer: httpx.Response, url: str) -> MeshnetError:
    try:
        told: Mapping[str, Any] = json.loads(answer.content)["error"]
        code, message = str(told["code"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        return TrackerUnavailable(f"{url} answered {answer.status_code} and not as a Meshnet tracker does")
    match code:
        case "not_authorized":
            return NotAuthorized(message)
        case "unknown_artifact":
            return UnknownArtifact(message, param="artifact")
        case "bad_artifact":
            return ArtifactError(message)
        case "unknown_model":
            return UnknownModel(message, param="model")
        case "bad_request":
            return RequestError(message, param=told.get("param"))
        case "no_route":
            return NoRoute(message)
        case "identity_refused":
            return IdentityRefused(message)
        case "session_lost":
            return SessionLost(message)
        case "lease_lost":
            return LeaseLost(message, superseded=bool(told.get("superseded")))
    return TrackerUnavailable(f"the tracker at {url} failed ({answer.status_code} {code}): {message}")
