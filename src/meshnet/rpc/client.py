"""A typed asyncio client of a worker's ``Shard`` service (shard.proto).

``WorkerPool`` keeps one channel per address; ``WorkerPool.worker`` binds a channel to the hop it serves, so that every
error names the hop. Errors are those of ``meshnet.errors``:

* ``HopRefused``  the worker answered and refused; ``refusal`` is the name in ``Refusal``
* ``HopLost``     no answer: connection refused or broken, or the deadline passed
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, Message

from meshnet.core import Ticket
from meshnet.errors import HopLost, HopRefused, MeshnetError
from meshnet.rpc.convert import ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb

_Response = TypeVar("_Response", bound=Message)

SERVICE = "meshnet.v1.Shard"
REFUSAL_METADATA = "meshnet-refusal-bin"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

#: Deadline of a call that only looks something up or frees something.
DEFAULT_TIMEOUT_S = 5.0

#: Most channels a pool keeps; the least recently used one is let go beyond that.
MAX_CHANNELS = 256

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A machine that vanishes without closing its connections is noticed by unanswered pings. Pings flow only while a
    # call is open.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # Keepalive waits for an unanswered ping of any other kind (flow control sends some), so these time out as soon.
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker that restarts on its old port must be usable at once; the default backs off up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Workers are addressed directly, whatever proxy the environment names. Retries are the caller's decision.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]

# What a status means if the worker attached no RefusalDetail. Any other code is a lost hop.
_REFUSAL_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: pb.REFUSAL_BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: pb.REFUSAL_UNSPECIFIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: pb.REFUSAL_NO_CAPACITY,
    grpc.StatusCode.UNAUTHENTICATED: pb.REFUSAL_BAD_TICKET,
    grpc.StatusCode.PERMISSION_DENIED: pb.REFUSAL_BAD_TICKET,
    grpc.StatusCode.NOT_FOUND: pb.REFUSAL_UNKNOWN_SESSION,
    grpc.StatusCode.INTERNAL: pb.REFUSAL_ENGINE_FAILURE,
    grpc.StatusCode.UNIMPLEMENTED: pb.REFUSAL_BAD_REQUEST,
}


def refusal_name(refusal: int) -> str:
    """Name of a ``Refusal``; a number this build does not know is named by its number."""
    try:
        return pb.Refusal.Name(refusal)
    except ValueError:
        return f"REFUSAL_{refusal}"


class WorkerPool:
    """Channels to workers, one per address. Use as an async context manager, or call ``close``."""

    def __init__(self) -> None:
        self._channels: OrderedDict[str, Any] = OrderedDict()
        self._evictions: set[asyncio.Task[None]] = set()

    def worker(self, address: str, *, shard_id: str = "", hop_index: int = 0) -> WorkerClient:
        """A client of the worker at ``address`` (host:port). Connects at the first call; never blocks."""
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            self._channels[address] = channel
            if len(self._channels) > MAX_CHANNELS:
                _, oldest = self._channels.popitem(last=False)
                eviction = asyncio.ensure_future(oldest.close(grace=60.0))
                self._evictions.add(eviction)
                eviction.add_done_callback(self._evictions.discard)
        self._channels.move_to_end(address)
        return WorkerClient(channel, address, shard_id or address, hop_index)

    async def close(self) -> None:
        """Close all channels; calls in progress fail."""
        channels, self._channels = list(self._channels.values()), OrderedDict()
        for eviction in self._evictions:
            eviction.cancel()
        await asyncio.gather(*self._evictions, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class WorkerClient:
    """One worker, as hop ``hop_index`` of a route. Every method raises ``HopRefused`` or ``HopLost``."""

    def __init__(self, channel: Any, address: str, shard_id: str, hop_index: int) -> None:
        self._channel = channel
        self.address = address
        self.shard_id = shard_id
        self.hop_index = hop_index

    def __str__(self) -> str:
        return f"hop {self.hop_index} ({self.shard_id})"

    async def describe(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> pb.DescribeResponse:
        return await self._call("Describe", pb.DescribeRequest(), pb.DescribeResponse, timeout_s)

    async def status(
        self, *, padding: bytes = b"", wait_for_ready: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> pb.StatusResponse:
        """How the worker is. ``wait_for_ready``: whoever asks knows that it is there, so that a connection that failed
        a moment ago is no answer."""
        request = pb.StatusRequest(padding=padding)
        return await self._call("Status", request, pb.StatusResponse, timeout_s, wait_for_ready=wait_for_ready)

    async def tokenize(
        self,
        ticket: Ticket,
        text: str,
        *,
        add_special: bool,
        parse_special: bool,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[int]:
        """Token ids of ``text``. ``add_special`` adds BOS/EOS as the model asks for; ``parse_special`` reads special
        tokens written in the text."""
        request = pb.TokenizeRequest(
            ticket=ticket_to_message(ticket), text=text, add_special=add_special, parse_special=parse_special
        )
        return list((await self._call("Tokenize", request, pb.TokenizeResponse, timeout_s)).tokens)

    async def detokenize(
        self, ticket: Ticket, tokens: Iterable[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[bytes]:
        """Bytes of each token; one token's bytes need not be valid UTF-8."""
        request = pb.DetokenizeRequest(ticket=ticket_to_message(ticket), tokens=tokens)
        return list((await self._call("Detokenize", request, pb.DetokenizeResponse, timeout_s)).pieces)

    async def open(self, request: pb.OpenRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> pb.OpenResponse:
        return await self._call("Open", request, pb.OpenResponse, timeout_s)

    async def close(self, ticket: Ticket, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> pb.CloseResponse:
        """Free the session. Idempotent: ``known`` is false for a session the worker does not have."""
        return await self._call("Close", pb.CloseRequest(ticket=ticket_to_message(ticket)), pb.CloseResponse, timeout_s)

    async def touch(self, ticket: Ticket, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Tell the worker that the session is still wanted; False if it does not have it (any more)."""
        request = pb.TouchRequest(ticket=ticket_to_message(ticket))
        return bool((await self._call("Touch", request, pb.TouchResponse, timeout_s)).known)

    def generate(self, request: pb.GenerateRequest) -> GenerateCall:
        """Start a generation (head only). The caller must read it to its end or ``cancel`` it."""
        multicallable = self._channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateEvent.FromString,
        )
        return GenerateCall(multicallable(request), self)

    async def _call(
        self,
        method: str,
        request: Message,
        response: type[_Response],
        timeout_s: float,
        *,
        wait_for_ready: bool = False,
    ) -> _Response:
        multicallable = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            answer = await multicallable(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error, self, method) from error
        if not isinstance(answer, response):
            raise self._undecodable(method)
        return answer

    def _undecodable(self, method: str) -> HopLost:
        return HopLost(
            f"{self} answered {method} with something that is not a {method} response; it may be another version",
            hop_index=self.hop_index,
            shard_id=self.shard_id,
        )


class GenerateCall:
    """A running Generate call: read events until ``finished`` or ``failed``, or ``cancel``."""

    def __init__(self, call: Any, worker: WorkerClient) -> None:
        self._call = call
        self._worker = worker

    async def read(self, *, timeout_s: float) -> pb.GenerateEvent | None:
        """The next event; ``None`` when the worker has ended the stream.

        Raises:
            HopRefused: the worker refused the call.
            HopLost: the stream broke, or nothing came for ``timeout_s`` seconds (the call is then cancelled).
        """
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._call.read()
        except TimeoutError as error:
            self._call.cancel()
            raise HopLost(
                f"{self._worker} sent nothing for {timeout_s:g} s",
                hop_index=self._worker.hop_index,
                shard_id=self._worker.shard_id,
            ) from error
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error, self._worker, "Generate") from error
        if event is grpc.aio.EOF:
            return None
        if not isinstance(event, pb.GenerateEvent):
            raise self._worker._undecodable("Generate")
        return event

    def cancel(self) -> None:
        """Stop the generation. The session stays open on the worker until ``close``."""
        self._call.cancel()


def error_from_status(error: Any, worker: WorkerClient, method: str) -> MeshnetError:
    """The exception for a gRPC status: what the RefusalDetail says, or else what the code means."""
    detail = _refusal_detail(error.trailing_metadata() or ())
    code = error.code()
    if detail is None and code not in _REFUSAL_BY_CODE:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            reason = "did not answer in time"
        else:
            reason = "was lost" if method == "Generate" else "cannot be reached"
        lost = HopLost(f"{worker} {reason} ({method})", hop_index=worker.hop_index, shard_id=worker.shard_id)
        # For the operator's log only: API clients see the message, and addresses are not their business.
        lost.add_note(f"{worker.address}: {code.name}: {error.details()}")
        return lost
    if detail is None:
        detail = pb.RefusalDetail(refusal=_REFUSAL_BY_CODE[code], message=error.details() or code.name)
    return HopRefused(
        f"{worker} refused {method}: {detail.message or refusal_name(detail.refusal)}",
        refusal=refusal_name(detail.refusal),
        shard_id=worker.shard_id,
        requested=detail.requested,
        limit=detail.limit,
    )


def _refusal_detail(metadata: Sequence[tuple[str, bytes | str]]) -> pb.RefusalDetail | None:
    for key, value in metadata:
        if key == REFUSAL_METADATA and isinstance(value, bytes):
            try:
                return pb.RefusalDetail.FromString(value)
            except DecodeError:
                return None
    return None
