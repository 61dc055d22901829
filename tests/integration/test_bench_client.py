"""The native client that the benchmark times routes with: what it tells, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from bench.route import CLIENT, GenerationFailed, Route, client_program, start
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions, find_worker
from meshnet.errors import UsageError
from meshnet.rpc.client import SERVICE
from meshnet.rpc.convert import ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.tickets import make_ticket

DEADLINE_S = 60.0
CAPACITY = 32
TOKEN = pb.GenerateEvent(token=pb.GeneratedToken(token=1))
FINISHED = pb.GenerateEvent(
    finished=pb.Finished(cause=pb.FINISH_LENGTH, generated_tokens=2, prefill_us=2**40, decode_us=7)
)
FAILED = pb.GenerateEvent(failed=pb.Failed(hop_index=3, message='hop "drei" is wäg\n\\'))


async def run_client(*arguments: str, stdin: bytes = b"") -> tuple[int | None, dict[str, Any]]:
    """Exit code and the one line that it prints."""
    process = await asyncio.create_subprocess_exec(
        *(str(client_program(find_worker())), *arguments), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, _ = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    (line,) = out.decode("ascii").splitlines()
    return process.returncode, json.loads(line)


def two_hops() -> AbstractAsyncContextManager[Route]:
    options = [
        WorkerOptions(
            model="test:2",
            layers=LayerRange(start=hop, end=hop + 1),
            engine="test",
            context_tokens=CAPACITY,
            sessions=1,
        )
        for hop in range(2)
    ]
    return start(find_worker(), options, name="two-hops", artifact_digest="test", capacity_tokens=CAPACITY)


@asynccontextmanager
async def head_that_sends(*events: pb.GenerateEvent) -> AsyncIterator[str]:
    """A server whose Generate answers with ``events``; its address."""

    async def generate(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        for event in events:
            yield event

    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateEvent.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_generation_is_timed_by_the_head_and_by_the_client() -> None:
    async with two_hops() as route:
        generation = await route.generate([1, 2, 3], 20)
    assert (generation.prefill.tokens, generation.decode.tokens) == (3, 19)
    for timing in (generation.prefill, generation.decode):
        assert timing.client_us is not None
        assert timing.duration_us > 0
        assert timing.client_us > 0
    # The client's clock runs from before the head has the request until after it has the token.
    assert (generation.prefill.client_us or 0) > generation.prefill.duration_us


async def test_events_are_told_as_they_came() -> None:
    async with head_that_sends(TOKEN, TOKEN, FINISHED) as address:
        code, told = await run_client(address, stdin=pb.GenerateRequest(tokens=[1]).SerializeToString())
    assert code == 0
    assert 0 < told.pop("first_token_us") < 1e6 * DEADLINE_S
    assert 0 < told.pop("client_decode_us") < 1e6 * DEADLINE_S
    assert told == {
        "tokens": 2,
        "cause": "FINISH_LENGTH",
        "generated_tokens": 2,
        "prefill_us": 2**40,
        "decode_us": 7,
    }


async def test_a_failed_route_and_a_stream_without_an_end_are_errors() -> None:
    async with head_that_sends(TOKEN, FAILED) as address:
        code, told = await run_client(address)
    assert (code, told) == (1, {"error": 'the route failed at hop 3: hop "drei" is w??g?\\'})
    async with head_that_sends(TOKEN) as address:
        code, told = await run_client(address)
    assert (code, told) == (1, {"error": "the stream ended after 1 tokens, without a cause"})


@pytest.mark.parametrize("garbage", [b"\xff" * 20, b"\x0a\x7f", random.Random(1).randbytes(200_000)])
async def test_garbage_instead_of_a_request_is_an_error(garbage: bytes) -> None:
    async with head_that_sends(TOKEN, FINISHED) as address:
        code, told = await run_client(address, stdin=garbage)
    assert (code, told) == (1, {"error": "standard input is not a GenerateRequest"})


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "nowhere:", 'dns://"\\\n/', "unix:/nonexistent"])
async def test_a_head_that_is_not_there_is_an_error(address: str) -> None:
    code, told = await run_client(address)
    assert code == 1
    assert told["error"].startswith("no connection to ")


async def test_a_wrong_command_line_is_an_error() -> None:
    code, told = await run_client()
    assert (code, told) == (1, {"error": f"usage: {CLIENT} ADDRESS"})


async def test_the_message_of_a_worker_that_refuses_the_ticket_is_told() -> None:
    async with two_hops() as route:
        head = route.shards[0]
        ticket = make_ticket(b"k" * 32, secrets.token_hex(16), 1, head.shard_id, int(time.time()) + 60)
        request = pb.GenerateRequest(ticket=ticket_to_message(ticket), tokens=[1])
        code, told = await run_client(head.address, stdin=request.SerializeToString())
    assert code == 1
    assert "the ticket is not for this worker, session and epoch" in told["error"]


async def test_a_route_says_why_it_did_not_generate() -> None:
    async with two_hops() as route:
        with pytest.raises(GenerationFailed, match="status 3: the prompt and one more token do not fit"):
            await route.generate([1] * (CAPACITY + 1), 1)
    async with two_hops() as route:
        with pytest.raises(GenerationFailed, match=f"^{CAPACITY} tokens were asked for, .* came: FINISH_CAPACITY"):
            await route.generate([1] * 8, CAPACITY)


async def test_what_builds_a_missing_client_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"upstream.py build --target {CLIENT}"):
        async with start(tmp_path / "meshnet-shard", [], name="none", artifact_digest="test", capacity_tokens=1):
            pass
