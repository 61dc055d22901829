"""The exception tree. Catch by layer; the message says what was wrong and what to do.

MeshnetError
├── UsageError              bad input from a person: option, file, configuration
│   ├── StoreError          the store root is missing, forbidden or full
│   └── ArtifactError       a model file is missing, malformed or not what it should be
├── RequestError            bad input from an API client (HTTP 4xx)
│   ├── UnknownModel
│   ├── UnknownArtifact
│   ├── PromptTooLong
│   └── BadParameter
├── RouteError              the mesh cannot serve the request now (HTTP 429/5xx)
│   ├── NoRoute             no set of ready shards covers the model
│   ├── Overloaded          every route is full
│   ├── HopRefused          a worker refused, with its typed reason
│   ├── HopLost             a worker went away in mid-session
│   ├── RepairFailed        no other route could be had in time
│   └── DeadlineExceeded    the answer took longer than the gateway allows
├── TrackerUnavailable      the tracker did not answer
├── LeaseLost               the tracker no longer knows this node's lease
├── SessionLost             the tracker no longer knows this session or its epoch
├── IdentityRefused         a node's identity is not accepted: wrong key, or in use on another machine
├── NotAuthorized           wrong or missing API key or join token
└── WorkerError             a worker process failed to start or died
    └── RangeRefused        the engine cannot cut these layers out of the model, whatever is tried
"""

from __future__ import annotations


class MeshnetError(Exception):
    """Base of every error that Meshnet raises on purpose."""


def for_the_log(error: BaseException) -> str:
    """An error's message with its notes, which are not for API clients."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


class UsageError(MeshnetError):
    """Bad input from a person."""


class StoreError(UsageError):
    """The store root is missing, forbidden or full."""


class ArtifactError(UsageError):
    """A model file is missing, malformed or not what it should be."""


class RequestError(MeshnetError):
    """Bad input from an API client. ``param`` names the offending parameter, if one does."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(RequestError):
    """No artifact of that name is known."""


class UnknownArtifact(RequestError):
    """Nobody has published that artifact at this tracker."""


class PromptTooLong(RequestError):
    """Prompt and answer do not fit the session; both counts are in the message and in the attributes."""

    def __init__(self, message: str, *, requested_tokens: int, limit_tokens: int) -> None:
        super().__init__(message, param="messages")
        self.requested_tokens = requested_tokens
        self.limit_tokens = limit_tokens


class BadParameter(RequestError):
    """A parameter has a value outside its range or is not supported."""


class RouteError(MeshnetError):
    """The mesh cannot serve the request now."""


class NoRoute(RouteError):
    """No set of ready shards covers the model."""


class Overloaded(RouteError):
    """Every route is full. ``retry_after_s`` is a hint for the client."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HopRefused(RouteError):
    """A worker refused. ``refusal`` is the name of the ``Refusal`` in shard.proto."""

    def __init__(self, message: str, *, refusal: str, shard_id: str, requested: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.refusal = refusal
        self.shard_id = shard_id
        self.requested = requested
        self.limit = limit


class HopLost(RouteError):
    """A worker went away in mid-session. ``hop_index`` and ``shard_id`` name it."""

    def __init__(self, message: str, *, hop_index: int, shard_id: str) -> None:
        super().__init__(message)
        self.hop_index = hop_index
        self.shard_id = shard_id


class RepairFailed(RouteError):
    """No other route could be had in time for an answer whose route broke."""


class DeadlineExceeded(RouteError):
    """The answer took longer than the gateway allows."""


class TrackerUnavailable(MeshnetError):
    """The tracker did not answer."""


class LeaseLost(MeshnetError):
    """The tracker no longer honours this node's lease.

    ``superseded`` is True if another process registered under the same node id, False if the lease merely ran out or
    was forgotten: then registering again is the way on.
    """

    def __init__(self, message: str, *, superseded: bool) -> None:
        super().__init__(message)
        self.superseded = superseded


class SessionLost(MeshnetError):
    """The tracker does not know this session, it is closed, or the epoch is not its last one."""


class IdentityRefused(MeshnetError):
    """A node's identity is not accepted: the key does not fit its id, or it is in use on another machine."""


class NotAuthorized(MeshnetError):
    """Wrong or missing API key or join token."""


class WorkerError(MeshnetError):
    """A worker process failed to start or died."""


class RangeRefused(WorkerError):
    """The engine cannot cut these layers out of the model, whatever is tried."""
