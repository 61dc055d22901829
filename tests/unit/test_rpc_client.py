"""The client of a worker's Shard service: refusals and lost workers become the right errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket

import grpc  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from meshnet.core import LayerRange
from meshnet.errors import HopLost, HopRefused
from meshnet.rpc.client import WorkerPool, refusal_name
from meshnet.rpc.convert import shard_from_description, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.tickets import make_ticket
from tests.support.shard_server import EOS, Broken, ShardServer

SESSION = "0f" * 16
TICKET = make_ticket(b"", SESSION, 1, "shard-0", 2_000_000_000)
OPEN = pb.OpenRequest(ticket=ticket_to_message(TICKET), n_hops=1, token_capacity=100)
GENERATE = pb.GenerateRequest(ticket=ticket_to_message(TICKET), tokens=[1, 2])


async def test_a_session_from_open_to_close() -> None:
    async with ShardServer() as server, WorkerPool() as pool:
        worker = pool.worker(server.address, shard_id="shard-0")
        assert (await worker.describe()).n_layer == 8
        assert await worker.tokenize(TICKET, "hé", add_special=True, parse_special=True) == [256, 104, 195, 169]
        assert await worker.detokenize(TICKET, [104, EOS]) == [b"h", b""]
        await worker.open(OPEN)
        assert (await worker.status()).open_sessions == 1
        call = worker.generate(GENERATE)
        pieces = []
        while (event := await call.read(timeout_s=5)) is not None:
            pieces.append(event.token.piece)
        assert pieces == [b"Hello", b" ", b"world", b"", b""]
        assert (await worker.close(TICKET)).stats.compute_us == 2500
        assert not (await worker.close(TICKET)).known


async def test_a_refusal_says_which_and_the_limit() -> None:
    detail = pb.RefusalDetail(refusal=pb.REFUSAL_TOO_LONG, message="too many", requested=200, limit=100)
    async with ShardServer(open_refusal=detail) as server, WorkerPool() as pool:
        with pytest.raises(HopRefused, match=r"hop 2 \(shard-0\) refused Open: too many") as caught:
            await pool.worker(server.address, shard_id="shard-0", hop_index=2).open(OPEN)
    error = caught.value
    assert (error.refusal, error.shard_id, error.requested, error.limit) == ("REFUSAL_TOO_LONG", "shard-0", 200, 100)


async def test_a_refusal_of_generate() -> None:
    async with ShardServer() as server, WorkerPool() as pool:
        with pytest.raises(HopRefused) as caught:
            await pool.worker(server.address).generate(GENERATE).read(timeout_s=5)
    assert caught.value.refusal == "REFUSAL_UNKNOWN_SESSION"


async def test_a_status_without_detail_is_named_by_its_code() -> None:
    # A server that knows no such service answers UNIMPLEMENTED, without our metadata.
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with WorkerPool() as pool:
        with pytest.raises(HopRefused) as caught:
            await pool.worker(f"127.0.0.1:{port}").describe()
    await server.stop(None)
    assert caught.value.refusal == "REFUSAL_BAD_REQUEST"


async def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        async with WorkerPool() as pool:
            with pytest.raises(HopLost, match=r"hop 1 \(b\) cannot be reached") as caught:
                await pool.worker(address, shard_id="b", hop_index=1).describe()
    assert (caught.value.hop_index, caught.value.shard_id) == (1, "b")
    # The address is for the log, not for clients.
    assert address not in str(caught.value)
    assert any(address in note for note in caught.value.__notes__)


async def test_a_worker_that_returns_on_its_port_is_used_at_once() -> None:
    async with WorkerPool() as pool:
        async with ShardServer() as server:
            worker = pool.worker(server.address)
            await worker.status()
            address = server.address
        with pytest.raises(HopLost):
            await worker.status()
        successor = ShardServer(address=address)
        async with successor:
            if successor.address != address:
                pytest.fail("the port was taken by another process")
            async with asyncio.timeout(5):
                while True:
                    try:
                        await worker.status()
                        break
                    except HopLost:
                        await asyncio.sleep(0.05)


async def test_a_call_has_a_deadline() -> None:
    gate = asyncio.Event()
    async with ShardServer(open_gate=gate) as server, WorkerPool() as pool:
        with pytest.raises(HopLost, match="did not answer in time"):
            await pool.worker(server.address).open(OPEN, timeout_s=0.1)
        gate.set()


async def test_a_silent_stream_is_lost_and_cancelled() -> None:
    never = asyncio.Event()
    async with ShardServer(script=[b"a", never]) as server, WorkerPool() as pool:
        worker = pool.worker(server.address, shard_id="shard-0")
        await worker.open(OPEN)
        call = worker.generate(GENERATE)
        assert (event := await call.read(timeout_s=5)) is not None
        assert event.token.piece == b"a"
        with pytest.raises(HopLost, match=r"sent nothing for 0\.1 s"):
            await call.read(timeout_s=0.1)
        async with asyncio.timeout(5):
            await server.cancelled.wait()


async def test_a_stream_that_breaks_is_lost() -> None:
    async with ShardServer(script=[b"a", Broken.UNAVAILABLE]) as server, WorkerPool() as pool:
        worker = pool.worker(server.address, shard_id="shard-0")
        await worker.open(OPEN)
        call = worker.generate(GENERATE)
        await call.read(timeout_s=5)
        with pytest.raises(HopLost, match="was lost"):
            await call.read(timeout_s=5)


def test_tickets_are_signed_as_the_schema_says() -> None:
    ticket = make_ticket(b"key", SESSION, 7, "shard-a", 1234)
    text = f"meshnet-ticket-v1\n{SESSION}\n7\nshard-a\n1234".encode()
    assert ticket.mac == hmac.new(b"key", text, hashlib.sha256).hexdigest()
    assert ticket_to_message(ticket).session_id == bytes.fromhex(SESSION)
    assert make_ticket(b"", SESSION, 7, "shard-a", 1234).mac == ""
    with pytest.raises(ValidationError):
        make_ticket(b"key", "not hex", 7, "shard-a", 1234)


async def test_a_worker_checks_its_tickets() -> None:
    async with ShardServer(worker_key=b"key") as server, WorkerPool() as pool:
        worker = pool.worker(server.address)
        with pytest.raises(HopRefused) as caught:
            await worker.open(OPEN)
        assert caught.value.refusal == "REFUSAL_BAD_TICKET"
        good = make_ticket(b"key", SESSION, 1, "shard-0", 2_000_000_000)
        await worker.open(pb.OpenRequest(ticket=ticket_to_message(good), n_hops=1, token_capacity=10))


def test_a_shard_from_a_description() -> None:
    description = ShardServer(layers=(2, 8)).description
    shard = shard_from_description(description, "10.0.0.1:50051")
    assert (shard.model, str(shard.layers), shard.address) == ("test-model", "2:8", "10.0.0.1:50051")
    assert shard.boundary_in.tensors[0].shape == (16,)
    assert shard_from_description(description, "h:1", model="org/name").model == "org/name"
    for change in (
        {"n_layer": 4},
        {"shard_id": ""},
        {"artifact_digest": ""},
        {"layers": pb.LayerRange(start=3, end=3)},
        {"boundary_in": pb.BoundarySchema(tensors=[pb.TensorSpec(name="x", shape=[1])], digest="d")},
    ):
        broken = pb.DescribeResponse()
        broken.CopyFrom(description)
        for name, value in change.items():
            broken.ClearField(name)
            broken.MergeFrom(pb.DescribeResponse(**{name: value}))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r".+"):
            shard_from_description(broken, "h:1")


def _with_cuts(*cuts: int, boundaries: int) -> pb.DescribeResponse:
    description = pb.DescribeResponse()
    description.CopyFrom(ShardServer(layers=(2, 8)).description)
    description.kv_bytes_per_token = 96
    description.ClearField("legal_cuts")
    description.legal_cuts.extend(cuts)
    description.ClearField("cut_boundaries")
    for index in range(boundaries):
        tensor = pb.TensorSpec(name="state", dtype=pb.DTYPE_F32, shape=[16 + index])
        description.cut_boundaries.append(pb.BoundarySchema(tensors=[tensor], digest=f"digest-{index}"))
    return description


def test_a_described_shard_can_be_cut() -> None:
    shard = shard_from_description(_with_cuts(3, 5, boundaries=2), "h:1")
    assert shard.kv_bytes_per_token == 96
    assert [(cut.layer, cut.boundary.digest) for cut in shard.cuts] == [(3, "digest-0"), (5, "digest-1")]
    part = shard.part(LayerRange(start=3, end=5))
    assert (part.boundary_in.digest, part.boundary_out.digest, part.cuts) == ("digest-0", "digest-1", ())
    assert part.boundary_out.tensors[0].shape == (17,)


def test_a_worker_that_tells_no_boundaries_serves_its_range_as_a_whole() -> None:
    assert shard_from_description(_with_cuts(3, 5, boundaries=0), "h:1").cuts == ()


@pytest.mark.parametrize(
    ("cuts", "boundaries"), [((3, 5), 1), ((3,), 2), ((5, 3), 2), ((3, 3), 2), ((2,), 1), ((8,), 1), ((1,), 1)]
)
def test_cuts_that_do_not_fit_the_range_are_malformed(cuts: tuple[int, ...], boundaries: int) -> None:
    with pytest.raises(ValueError, match="legal cuts"):
        shard_from_description(_with_cuts(*cuts, boundaries=boundaries), "h:1")


def test_refusals_of_newer_workers_have_a_name_too() -> None:
    assert refusal_name(pb.REFUSAL_DRAINING) == "REFUSAL_DRAINING"
    assert refusal_name(999) == "REFUSAL_999"
