"""Nodes and workers that only seem to be there, in numbers, for load on a tracker."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc  # type: ignore[import-untyped]
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.core import Boundary, LayerRange, Shard, TensorSpec
from meshnet.node.identity import NodeIdentity
from meshnet.rpc.client import SERVICE
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.tracker.messages import Heartbeat, Lease, LinkMeasure, ShardAdvertisement, ShardLoad

WORKER_KEY = "5f" * 32
_ARTIFACT = "sha256:" + "ab" * 32
_BUILD = "simulated"
_TIMEOUT_S = 30.0
#: Neighbours that a node tells its links to.
_LINKS = 8


@dataclass
class SimulatedNode:
    """One node with one shard. ``lease`` is there once it has registered."""

    identity: NodeIdentity
    instance: str
    shard: Shard
    neighbours: Sequence[str]
    lease: Lease | None = None
    address: str = ""
    _beats: int = 0
    _template: tuple[bytes, bytes] | None = None

    def begin(self, lease: Lease) -> None:
        """Heartbeat under this lease from now on."""
        self.lease, self._template = lease, None

    def heartbeat(self) -> bytes:
        """The next heartbeat's body: counters go up, as a worker's do."""
        if self.lease is None:
            raise RuntimeError("the node has no lease")
        if self._template is None:
            mark = 987_654_321
            load = ShardLoad(prefill_tokens=mark, prefill_compute_us=1000, resident_bytes=1 << 30)
            shard = self.shard.model_copy(update={"address": self.address})
            beat = Heartbeat(
                lease_epoch=self.lease.lease_epoch,
                instance=self.instance,
                shards=(ShardAdvertisement(shard=shard, worker_key=WORKER_KEY, load=load),),
                links=tuple(
                    LinkMeasure(shard_id=shard_id, rtt_ms=0.4 + 0.1 * index, bytes_per_s=1e8)
                    for index, shard_id in enumerate(self.neighbours)
                ),
            )
            before, _, after = beat.model_dump_json().encode().partition(str(mark).encode())
            self._template = before, after
        self._beats += 1
        before, after = self._template
        return b"%b%d%b" % (before, 400 * self._beats, after)


def make_nodes(count: int, n_layer: int, layers_per_shard: int, *, seed: int) -> list[SimulatedNode]:
    """``count`` nodes that cover ``n_layer`` layers over and over."""
    draw = random.Random(seed)
    ranges = [
        LayerRange(start=start, end=min(start + layers_per_shard, n_layer))
        for start in range(0, n_layer, layers_per_shard)
    ]
    ids = [f"node-{index:04}" for index in range(count)]
    nodes = []
    for index, node_id in enumerate(ids):
        key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{seed} {node_id}".encode()).digest())
        machine = hashlib.sha256(node_id.encode()).hexdigest()
        nodes.append(
            SimulatedNode(
                identity=NodeIdentity(node_id=node_id, machine=machine, key=key),
                instance=f"{draw.getrandbits(128):032x}",
                shard=_shard(f"{node_id}/0", ranges[index % len(ranges)], n_layer),
                neighbours=[f"{each}/0" for each in draw.sample(ids, min(_LINKS, count))],
            )
        )
    return nodes


def _shard(shard_id: str, layers: LayerRange, n_layer: int) -> Shard:
    residual = Boundary(tensors=(TensorSpec(name="residual", dtype="f32", shape=(4096,)),), digest="residual")
    empty = Boundary(digest="empty")
    return Shard(
        shard_id=shard_id,
        address="127.0.0.1:1",
        model="simulated",
        artifact_digest=_ARTIFACT,
        architecture="llama",
        n_layer=n_layer,
        layers=layers,
        boundary_in=residual if layers.start else empty,
        boundary_out=residual if layers.end < n_layer else empty,
        compatibility_id=_BUILD,
        build_id=_BUILD,
        engine="test",
        n_ctx_train=131_072,
        session_capacity_tokens=131_072,
        session_slots=8,
        max_step_tokens=512,
    )


class SimulatedWorkers:
    """A worker for each node, on a port of its own. Use as an async context manager: nodes get their addresses.

    Any session is opened, and Generate gives one token: all that a probe asks for.
    """

    def __init__(self, nodes: Sequence[SimulatedNode]) -> None:
        self._nodes = nodes
        self._servers: list[Any] = []

    async def __aenter__(self) -> Self:
        for node in self._nodes:
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((_handler(node.shard),))
            node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            self._servers.append(server)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(server.stop(None) for server in self._servers))


def _handler(shard: Shard) -> Any:
    description = pb.DescribeResponse(
        shard_id=shard.shard_id,
        artifact_digest=shard.artifact_digest,
        architecture=shard.architecture,
        model_name=shard.model,
        n_layer=shard.n_layer,
        n_vocab=1000,
        n_ctx_train=shard.n_ctx_train,
        layers=pb.LayerRange(start=shard.layers.start, end=shard.layers.end),
        boundary_in=_schema(shard.boundary_in),
        boundary_out=_schema(shard.boundary_out),
        session_capacity_tokens=shard.session_capacity_tokens,
        session_slots=shard.session_slots,
        compatibility_id=shard.compatibility_id,
        build_id=shard.build_id,
        engine=shard.engine,
        max_step_tokens=shard.max_step_tokens,
        chunk_tokens=256,
        can_rollback=True,
    )
    answers: dict[str, tuple[Any, Any]] = {
        "Describe": (pb.DescribeRequest, description),
        "Status": (pb.StatusRequest, pb.StatusResponse(session_slots=shard.session_slots)),
        "Tokenize": (pb.TokenizeRequest, pb.TokenizeResponse(tokens=[1])),
        "Detokenize": (pb.DetokenizeRequest, pb.DetokenizeResponse(pieces=[b"a"])),
        "Open": (pb.OpenRequest, pb.OpenResponse()),
        "Close": (pb.CloseRequest, pb.CloseResponse(known=True)),
        "Touch": (pb.TouchRequest, pb.TouchResponse(known=True)),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            _always(answer), request_deserializer=request.FromString, response_serializer=_serialize
        )
        for name, (request, answer) in answers.items()
    }
    handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
        _generate, request_deserializer=pb.GenerateRequest.FromString, response_serializer=_serialize
    )
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _always(answer: Any) -> Callable[[Any, Any], Any]:
    async def give(request: Any, context: Any) -> Any:
        return answer

    return give


async def _generate(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
    count = max(1, request.max_new_tokens)
    for index in range(count):
        yield pb.GenerateEvent(token=pb.GeneratedToken(position=len(request.tokens) + index, token=1, piece=b"a"))
    finished = pb.Finished(cause=pb.FINISH_LENGTH, generated_tokens=count, prefill_us=1000, decode_us=0)
    yield pb.GenerateEvent(finished=finished)


def _schema(boundary: Boundary) -> pb.BoundarySchema:
    tensors = [pb.TensorSpec(name=each.name, dtype=pb.DTYPE_F32, shape=each.shape) for each in boundary.tensors]
    return pb.BoundarySchema(tensors=tensors, digest=boundary.digest)


def _serialize(message: Any) -> bytes:
    serialized: bytes = message.SerializeToString()
    return serialized


class Connection:
    """HTTP/1.1 to one server, one request at a time, kept open: a client so lean that a thousand fit in one process
    without being what is measured."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port = host, port
        self._head = f"host: {host}:{port}\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            OSError, EOFError, TimeoutError: no answer.
            ValueError: it is not HTTP.
        """
        async with asyncio.timeout(_TIMEOUT_S):
            if self._streams is not None and self._streams[0].at_eof():
                self.close()  # by the server: it was idle for too long
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            head = f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            first, *lines = answer.decode("latin-1").split("\r\n")
            length = 0
            for line in lines:
                name, _, value = line.partition(":")
                if name.lower() == "content-length":
                    length = int(value)
            return int(first.split(" ")[1]), await reader.readexactly(length)

    def close(self) -> None:
        """Let go of it; the next request connects again."""
        if self._streams is not None:
            with suppress(OSError):
                self._streams[1].close()
            self._streams = None
