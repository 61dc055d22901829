"""A worker's ``Shard`` service in Python, on a real socket: sessions, slots, tickets and typed refusals as in
shard.proto, with answers that a test writes down. It has no seam: the head says what the script says."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc  # type: ignore[import-untyped]

from meshnet.core import Shard
from meshnet.rpc.client import REFUSAL_METADATA, SERVICE
from meshnet.rpc.convert import shard_from_description
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.prefix import prefix_hash

BOS, EOS, N_VOCAB = 256, 257, 258

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "


class Broken(Enum):
    """The stream ends with this gRPC status."""

    UNAVAILABLE = "UNAVAILABLE"
    OK_WITHOUT_END = "OK"


#: A token's bytes, a whole event, a moment to wait for, or a break of the stream.
Step = bytes | pb.GenerateEvent | asyncio.Event | Broken


@dataclass
class ShardServer:
    """One worker. Use as an async context manager; ``address`` is known inside."""

    shard_id: str = "shard-0"
    layers: tuple[int, int] = (0, 8)
    n_layer: int = 8
    slots: int = 4
    session_tokens: int = 512
    n_ctx_train: int = 100_000
    chat_template: str = TEMPLATE
    adds_bos: bool = True
    worker_key: bytes = b""
    #: What Generate says; the end-of-generation token and ``finished`` follow by themselves.
    script: Sequence[Step] = (b"Hello", b" ", b"world")
    #: What the first Generate calls say instead, one after the other.
    first_scripts: list[Sequence[Step]] = field(default_factory=list)
    #: Refuses Open, if set.
    open_refusal: pb.RefusalDetail | None = None
    #: Open waits for this.
    open_gate: asyncio.Event | None = None
    artifact_digest: str = "sha256:tiny"
    compatibility_id: str = "test"
    max_step_tokens: int = 64
    #: So many Close calls get no answer.
    deaf_closes: int = 0
    #: Where to listen; by default any free port.
    address: str = ""
    sessions: dict[bytes, pb.OpenRequest] = field(default_factory=dict)
    opened: list[pb.OpenRequest] = field(default_factory=list)
    generated: list[pb.GenerateRequest] = field(default_factory=list)
    tokenized: list[pb.TokenizeRequest] = field(default_factory=list)
    #: Sessions in the order in which Close found them.
    closed: list[bytes] = field(default_factory=list)
    #: Tokens that each session holds, as Open tells a gateway that opens it again.
    held_tokens: dict[bytes, list[int]] = field(default_factory=dict)
    touched: list[bytes] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    generating: asyncio.Event = field(default_factory=asyncio.Event)
    _server: Any = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        unary: dict[str, tuple[Callable[..., Any], Any]] = {
            "Describe": (self._describe, pb.DescribeRequest),
            "Status": (self._status, pb.StatusRequest),
            "Tokenize": (self._tokenize, pb.TokenizeRequest),
            "Detokenize": (self._detokenize, pb.DetokenizeRequest),
            "Open": (self._open, pb.OpenRequest),
            "Close": (self._close, pb.CloseRequest),
            "Touch": (self._touch, pb.TouchRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                function, request_deserializer=request.FromString, response_serializer=_serialize
            )
            for name, (function, request) in unary.items()
        }
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            self._generate, request_deserializer=pb.GenerateRequest.FromString, response_serializer=_serialize
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port(self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End at once: running calls break off."""
        await self._server.stop(grace=None)

    @property
    def shard(self) -> Shard:
        return shard_from_description(self.description, self.address, model="tiny")

    @property
    def description(self) -> pb.DescribeResponse:
        start, end = self.layers
        return pb.DescribeResponse(
            shard_id=self.shard_id,
            artifact_digest=self.artifact_digest,
            architecture="test",
            model_name="test model",
            n_layer=self.n_layer,
            n_vocab=N_VOCAB,
            n_ctx_train=self.n_ctx_train,
            layers=pb.LayerRange(start=start, end=end),
            boundary_in=_boundary(start > 0),
            boundary_out=_boundary(end < self.n_layer),
            session_capacity_tokens=self.session_tokens,
            session_slots=self.slots,
            compatibility_id=self.compatibility_id,
            build_id="test build",
            engine="test",
            max_step_tokens=self.max_step_tokens,
            chunk_tokens=32,
            can_rollback=True,
            chat_template=self.chat_template,
            bos_token="<bos>",
            eos_token="<eos>",
            add_bos=self.adds_bos,
        )

    async def _describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return self.description

    async def _status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        return pb.StatusResponse(open_sessions=len(self.sessions), session_slots=self.slots)

    async def _tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        await self._check_ticket(request.ticket, context)
        self.tokenized.append(request)
        return pb.TokenizeResponse(
            tokens=[*([BOS] if request.add_special and self.adds_bos else []), *request.text.encode()]
        )

    async def _detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        await self._check_ticket(request.ticket, context)
        return pb.DetokenizeResponse(pieces=[bytes([token]) if token < 256 else b"" for token in request.tokens])

    async def _open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        await self._check_ticket(request.ticket, context)
        if self.open_gate is not None:
            await self.open_gate.wait()
        if self.open_refusal is not None:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, self.open_refusal)
        before = self.sessions.get(request.ticket.session_id)
        if before is None and len(self.sessions) >= self.slots:
            detail = pb.RefusalDetail(refusal=pb.REFUSAL_NO_CAPACITY, message="all slots are taken")
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, detail)
        if request.token_capacity > self.session_tokens:
            detail = pb.RefusalDetail(
                refusal=pb.REFUSAL_TOO_LONG, requested=request.token_capacity, limit=self.session_tokens
            )
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, detail)
        self.sessions[request.ticket.session_id] = request
        self.opened.append(request)
        held = self.held_tokens.get(request.ticket.session_id, [])
        answer = pb.OpenResponse(cached_tokens=len(held), prefix_hash=prefix_hash(held))
        if before is not None:
            answer.ended.CopyFrom(self._stats(before))
        return answer

    async def _touch(self, request: pb.TouchRequest, context: Any) -> pb.TouchResponse:
        await self._check_ticket(request.ticket, context)
        self.touched.append(request.ticket.session_id)
        return pb.TouchResponse(known=request.ticket.session_id in self.sessions)

    async def _close(self, request: pb.CloseRequest, context: Any) -> pb.CloseResponse:
        await self._check_ticket(request.ticket, context)
        if self.deaf_closes:
            self.deaf_closes -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "deaf")
        held = self.sessions.get(request.ticket.session_id)
        if held is not None and request.ticket.epoch < held.ticket.epoch:
            detail = pb.RefusalDetail(refusal=pb.REFUSAL_STALE_EPOCH, message="this epoch is over")
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, detail)
        opened = self.sessions.pop(request.ticket.session_id, None)
        if opened is None:
            return pb.CloseResponse(known=False)
        self.closed.append(request.ticket.session_id)
        return pb.CloseResponse(known=True, stats=self._stats(opened))

    def _stats(self, opened: pb.OpenRequest) -> pb.HopStats:
        return pb.HopStats(
            hop_index=opened.hop_index,
            shard_id=self.shard_id,
            layers=opened.layers,
            queue_us=1500,
            compute_us=2500,
            network_us=3500,
            bytes_in=10,
            bytes_out=20,
            prefill_tokens=5,
            decode_tokens=6,
            sample_us=500,
        )

    async def _generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        await self._check_ticket(request.ticket, context)
        if request.ticket.session_id not in self.sessions:
            detail = pb.RefusalDetail(refusal=pb.REFUSAL_UNKNOWN_SESSION, message="open the session first")
            await _refuse(context, grpc.StatusCode.NOT_FOUND, detail)
        self.generated.append(request)
        self.generating.set()
        position = request.cached_tokens + len(request.tokens)
        count = 0
        script = self.first_scripts.pop(0) if self.first_scripts else self.script
        try:
            for step in script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, pb.GenerateEvent):
                    yield step
                    if step.WhichOneof("event") in ("finished", "failed"):
                        return
                elif step is Broken.OK_WITHOUT_END:
                    return
                elif isinstance(step, Broken):
                    await context.abort(grpc.StatusCode[step.value], "as the script says")
                else:
                    yield _token(step, position + count, count, request.sampling.logprobs)
                    count += 1
                    if count == request.max_new_tokens:
                        yield _finished(pb.FINISH_LENGTH, count)
                        return
            end = pb.GeneratedToken(position=position + count, token=EOS, is_eog=True)
            yield pb.GenerateEvent(token=end)
            yield _finished(pb.FINISH_EOG, count + 1)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _check_ticket(self, ticket: pb.Ticket, context: Any) -> None:
        if not self.worker_key:
            return
        text = f"meshnet-ticket-v1\n{ticket.session_id.hex()}\n{ticket.epoch}\n{self.shard_id}\n{ticket.expires_unix_s}"
        if ticket.mac != hmac.new(self.worker_key, text.encode(), hashlib.sha256).digest():
            detail = pb.RefusalDetail(refusal=pb.REFUSAL_BAD_TICKET, message="the ticket is forged")
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, detail)


def failed(refusal: int, message: str, *, hop_index: int, shard_id: str) -> pb.GenerateEvent:
    failure = pb.Failed(message=message, hop_index=hop_index, shard_id=shard_id)
    failure.refusal = refusal  # type: ignore[assignment]
    return pb.GenerateEvent(failed=failure)


def _token(piece: bytes, position: int, index: int, logprobs: int) -> pb.GenerateEvent:
    token = pb.GeneratedToken(position=position, token=piece[0] if piece else 0, piece=piece)
    if logprobs:
        token.has_logprob = True
        token.logprob = -0.5 - index
        for rank in range(logprobs - 1):
            token.top.add(token=rank, logprob=-0.25 - rank, piece=b"t%d" % rank)
    return pb.GenerateEvent(token=token)


def _finished(cause: pb.FinishCause, count: int) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        finished=pb.Finished(cause=cause, generated_tokens=count, prefill_us=20_000, decode_us=40_000)
    )


def _boundary(inside: bool) -> pb.BoundarySchema:
    if not inside:
        return pb.BoundarySchema(digest="empty")
    return pb.BoundarySchema(tensors=[pb.TensorSpec(name="state", dtype=pb.DTYPE_F32, shape=[16])], digest="state")


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


async def _refuse(context: Any, code: grpc.StatusCode, detail: pb.RefusalDetail) -> NoReturn:
    await context.abort(code, detail.message, ((REFUSAL_METADATA, detail.SerializeToString()),))
    raise RuntimeError("abort returned")
