"""The gateway over HTTP, driven by httpx and the unmodified ``openai`` client; workers have written-down answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI

from meshnet.core import FinishCause, RouteSession, ServedModel
from meshnet.errors import Overloaded, TrackerUnavailable, UsageError
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.generated import shard_pb2 as pb
from tests.support.gateway_server import API_KEY, serve_gateway, until
from tests.support.shard_server import Broken, ShardServer, failed
from tests.support.static_routes import StaticRoutes

USER: Any = [{"role": "user", "content": "hi"}]
LOST = failed(pb.REFUSAL_PEER_LOST, "connection reset", hop_index=1, shard_id="tail")


@dataclass
class Api:
    url: str
    app: FastAPI
    http: httpx.AsyncClient
    client: AsyncOpenAI
    routes: StaticRoutes

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"model": "tiny", "messages": USER, **fields})

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def counted(self, line: str) -> None:
        """Wait until the metrics have ``line``."""
        async with asyncio.timeout(5):
            while True:
                if line in await self.metrics():
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def api(*servers: ShardServer, routes: StaticRoutes | None = None, **settings: Any) -> AsyncIterator[Api]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        routes = routes or StaticRoutes(())
        routes.shards = [server.shard for server in servers]
        url, app = await stack.enter_async_context(serve_gateway(routes, **settings))
        headers = {"authorization": f"Bearer {API_KEY}"}
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, headers=headers, timeout=20))
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=20)
        yield Api(url, app, http, await stack.enter_async_context(client), routes)
        for server in servers:
            await until(lambda server=server: not server.sessions, "every session is closed")  # type: ignore[misc]


def halves(**head: Any) -> tuple[ShardServer, ShardServer]:
    return ShardServer(shard_id="head", layers=(0, 4), **head), ShardServer(shard_id="tail", layers=(4, 8))


def events(text: str) -> list[Any]:
    """Data of server-sent events; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


# ---------------------------------------------------------------------------------------------------- answers


async def test_chat() -> None:
    async with api(*halves()) as mesh:
        answer = await mesh.client.chat.completions.create(model="tiny", messages=USER, max_tokens=10)
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello world", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("[user] hi\n[assistant] ") + 1
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    telemetry: Any = answer.model_extra
    assert telemetry["meshnet"]["finish_cause"] == "eog"
    assert [hop["layers"] for hop in telemetry["meshnet"]["hops"]] == ["0:4", "4:8"]


async def test_streamed_chat_is_as_openai_streams_it() -> None:
    async with api(*halves()) as mesh:
        response = await mesh.chat(stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    opening, *texts, last, usage = chunks
    assert opening["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [text["choices"][0]["delta"] for text in texts] == [
        {"content": "Hello"},
        {"content": " "},
        {"content": "world"},
    ]
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert last["meshnet"]["generated_tokens"] == 4
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("meshnet" not in chunk for chunk in [*chunks[:-2], usage])


async def test_usage_is_streamed_only_if_asked_for() -> None:
    async with api(ShardServer()) as mesh:
        chunks = events((await mesh.chat(stream=True)).text)
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert "meshnet" in chunks[-2]


async def test_streamed_chat_with_the_openai_client() -> None:
    async with api(ShardServer(script=["€".encode()[:1], "€".encode()[1:], b"<en", b"d>", b"x"])) as mesh:
        stream = await mesh.client.chat.completions.create(
            model="tiny", messages=USER, stream=True, stop=["<end>"], stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "€"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_completions_whole_and_streamed() -> None:
    async with api(ShardServer()) as mesh:
        answer = await mesh.client.completions.create(model="tiny", prompt="hi", max_tokens=2)
        assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
            "text_completion",
            "Hello ",
            "length",
        )
        stream = await mesh.client.completions.create(model="tiny", prompt=[1, 2], stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_an_answer_without_text_still_has_its_chunks() -> None:
    async with api(ShardServer(script=[])) as mesh:
        opening, last, done = events((await mesh.chat(stream=True)).text)
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert last["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
        assert (await mesh.chat()).json()["choices"][0]["message"]["content"] == ""


async def test_logprobs_stay_with_their_text() -> None:
    script = [b"one", b" ", "€".encode()[:1], "€".encode()[1:], b"!<st", b"op>"]
    async with api(ShardServer(script=script)) as mesh:
        answer = await mesh.client.chat.completions.create(
            model="tiny", messages=USER, logprobs=True, top_logprobs=2, stop="<stop>"
        )
        stream = await mesh.client.chat.completions.create(
            model="tiny", messages=USER, logprobs=True, top_logprobs=2, stop="<stop>", stream=True
        )
        chunks = [chunk async for chunk in stream]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.choices[0].message.content == "one €!"
    assert [entry.token for entry in logprobs.content] == ["one", " ", "\ufffd", "\ufffd\ufffd", "!<st"]
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or ()).decode() == "one €!<st"
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("t0", -0.25), ("t1", -1.25)]
    streamed = [
        (chunk.choices[0].delta.content, [entry.token for entry in chunk.choices[0].logprobs.content or ()])
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
    ]
    assert streamed == [("one", ["one"]), (" ", [" "]), ("€", ["\ufffd", "\ufffd\ufffd"]), ("!", ["!<st"])]


async def test_logprobs_of_completions() -> None:
    async with api(ShardServer(script=[b"a", "é".encode(), b"b"])) as mesh:
        answer = await mesh.client.completions.create(model="tiny", prompt="hi", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "é", "b"]
    assert logprobs.token_logprobs == [-0.5, -1.5, -2.5]
    assert logprobs.top_logprobs == [{"t0": -0.25}] * 3
    assert logprobs.text_offset == [0, 1, 2]


async def test_impossible_tokens_have_a_finite_logprob() -> None:
    token = pb.GeneratedToken(position=23, piece=b"a", has_logprob=True, logprob=float("-inf"))
    async with api(ShardServer(script=[pb.GenerateEvent(token=token)])) as mesh:
        body = (await mesh.chat(logprobs=True, max_tokens=1)).json()
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_models() -> None:
    async with api(*halves()) as mesh:
        models = await mesh.client.models.list()
        assert [(model.id, model.owned_by) for model in models.data] == [("tiny", "meshnet")]
        assert (await mesh.client.models.retrieve("tiny")).created == 1_700_000_000
        with pytest.raises(openai.NotFoundError):
            await mesh.client.models.retrieve("org/other")


# ------------------------------------------------------------------------------------------------------- auth


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", f"Basic {API_KEY}", API_KEY, f"Bearer {API_KEY}x"])
async def test_a_wrong_key_is_refused(header: str | None) -> None:
    async with api(ShardServer()) as mesh, httpx.AsyncClient(base_url=mesh.url) as http:
        headers = {} if header is None else {"authorization": header}
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions")):
            response = await http.request(method, path, headers=headers, content=b"{}" if method == "POST" else None)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


async def test_the_openai_client_with_a_wrong_key() -> None:
    async with api(ShardServer()) as mesh:
        with pytest.raises(openai.AuthenticationError) as caught:
            await mesh.client.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"


async def test_any_of_several_keys_and_none() -> None:
    async with api(ShardServer(), api_keys=("one", "two")) as mesh:
        for key, status in (("one", 200), ("two", 200), ("three", 401)):
            response = await mesh.http.get("/v1/models", headers={"authorization": f"bearer {key}"})
            assert response.status_code == status
    async with (
        api(ShardServer(), api_keys=(), require_api_key=False) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as anonymous,
    ):
        assert (await anonymous.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [{}, {"api_keys": ("",)}, {"api_keys": ("k",), "max_running": 0}, {"api_keys": ("k",), "step_timeout_s": -1.0}],
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        GatewaySettings(**settings)


async def test_health_is_open_and_metrics_can_be_closed() -> None:
    async with (
        api(ShardServer(), metrics_require_api_key=True) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as anonymous,
    ):
        assert (await anonymous.get("/health")).json()["status"] == "ok"
        assert (await anonymous.get("/metrics")).status_code == 401
        assert (await mesh.http.get("/metrics")).status_code == 200


# ----------------------------------------------------------------------------------------------------- errors


async def test_errors_before_an_answer_are_typed_for_the_openai_client() -> None:
    async with api(*halves(session_tokens=100)) as mesh:
        create = mesh.client.chat.completions.create
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError) as unknown:
                await create(model="huge", messages=USER, stream=stream)
            assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError) as long:
                await create(model="tiny", messages=[{"role": "user", "content": "x" * 200}], stream=stream)
            assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
            assert "holds 100 tokens" in long.value.message
            assert "the prompt has 221 tokens" in long.value.message
            with pytest.raises(openai.BadRequestError) as hot:
                await create(model="tiny", messages=USER, temperature=3, stream=stream)
            assert (hot.value.code, hot.value.param) == ("invalid_parameter", "temperature")
        with pytest.raises(openai.BadRequestError) as long:
            await mesh.client.completions.create(model="tiny", prompt="x" * 200)
        assert long.value.param == "prompt"


async def test_no_route_is_503() -> None:
    head, _ = halves()
    async with api(head) as mesh:
        for stream in (False, True):
            response = await mesh.chat(stream=stream)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_route")


async def test_overload_is_429_with_retry_after() -> None:
    full = pb.RefusalDetail(refusal=pb.REFUSAL_NO_CAPACITY, message="no slot")
    async with api(ShardServer(open_refusal=full)) as mesh:
        for stream in (False, True):
            response = await mesh.chat(stream=stream)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
            assert response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            await mesh.client.chat.completions.create(model="tiny", messages=USER)


async def test_a_refused_generate_is_overload_too() -> None:
    full = failed(pb.REFUSAL_NO_CAPACITY, "the queue is full", hop_index=0, shard_id="shard-0")
    async with api(ShardServer(script=[full])) as mesh:
        assert (await mesh.chat()).status_code == 429


async def test_the_hint_of_the_tracker_is_passed_on() -> None:
    class Busy(StaticRoutes):
        async def open_session(self, model: str, **wanted: Any) -> RouteSession:
            raise Overloaded("every route is full", retry_after_s=7)

    async with api(ShardServer(), routes=Busy(())) as mesh:
        assert (await mesh.chat()).headers["retry-after"] == "7"


async def test_a_tracker_that_is_away_and_one_that_breaks() -> None:
    class Away(StaticRoutes):
        async def models(self) -> Sequence[ServedModel]:
            raise TrackerUnavailable("the tracker does not answer")

        async def open_session(self, model: str, **wanted: Any) -> RouteSession:
            raise ZeroDivisionError("secret detail")

    async with api(ShardServer(), routes=Away(())) as mesh:
        response = await mesh.http.get("/v1/models")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "tracker_unavailable")
        for stream in (False, True):
            response = await mesh.chat(stream=stream)
            assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
            assert "secret" not in response.text


@pytest.mark.parametrize(
    ("step", "code", "hop"),
    [
        (LOST, "hop_lost", {"shard": "tail", "index": 1}),
        (
            failed(pb.REFUSAL_ENGINE_FAILURE, "NaN", hop_index=0, shard_id="head"),
            "hop_refused",
            {"shard": "head", "refusal": "REFUSAL_ENGINE_FAILURE"},
        ),
        (Broken.UNAVAILABLE, "hop_lost", {"shard": "head", "index": 0}),
    ],
)
async def test_a_route_that_breaks_before_the_first_byte_is_502(step: Any, code: str, hop: dict[str, Any]) -> None:
    async with api(*halves(script=[step])) as mesh:
        for stream in (False, True):
            response = await mesh.chat(stream=stream)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["hop"]) == (502, code, hop)
            assert response.json()["meshnet"]["finish_cause"] == "failed"


async def test_a_route_that_breaks_in_mid_answer() -> None:
    async with api(*halves(script=[b"Hel", b"lo", LOST])) as mesh:
        response = await mesh.chat(stream=True)
        assert response.status_code == 200
        *chunks, error = events(response.text)
        message = error["error"].pop("message")
        assert message.startswith("hop 1 (tail), layers 4:8, was lost, and no other route was found within 0.3 s: ")
        assert error["error"] == {
            "type": "server_error",
            "param": None,
            "code": "hop_lost",
            "hop": {"shard": "tail", "index": 1},
        }
        assert error["meshnet"]["generated_tokens"] == 2
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)

        stream = await mesh.client.chat.completions.create(model="tiny", messages=USER, stream=True)
        texts = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match=r"hop 1 \(tail\)") as caught:
            await read()
        assert texts == ["", "Hel", "lo"]
        assert caught.value.code == "hop_lost"
        body: Any = caught.value.body
        assert body["hop"]["shard"] == "tail"
        # Not streamed, nothing of the broken answer is sent.
        assert (await mesh.chat()).status_code == 502


async def test_paths_and_methods_that_do_not_exist() -> None:
    async with api(ShardServer()) as mesh:
        for method, path, status, code in (
            ("GET", "/v1/embeddings", 404, "not_found"),
            ("GET", "/", 404, "not_found"),
            ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
            ("POST", "/v1/models", 405, "method_not_allowed"),
            ("GET", "/docs", 404, "not_found"),
        ):
            response = await mesh.http.request(method, path)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_bodies_over_the_limit() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async with api(ShardServer(), max_body_bytes=1000) as mesh:
        announced = await mesh.http.post("/v1/completions", content=b" " * 1001)
        unannounced = await mesh.http.post("/v1/completions", content=endless())
        for response in (announced, unannounced):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert (await mesh.http.post("/v1/completions", content=b" " * 1000)).status_code == 400


async def test_a_body_that_never_ends_is_refused() -> None:
    async with api(ShardServer(), body_timeout_s=0.1) as mesh:
        url = mesh.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {mesh.http.headers['authorization']}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"}")
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_too_slow"' in answer


async def test_a_probability_too_small_for_the_wire_does_not_turn_a_sampler_off() -> None:
    async with api(head := ShardServer()) as mesh:
        body = {"model": "tiny", "prompt": "x", "typical_p": 1e-300, "top_p": 0}
        assert (await mesh.http.post("/v1/completions", json=body)).status_code == 200
        assert head.generated[0].sampling.typical_p > 0
        assert head.generated[0].sampling.top_p > 0


# -------------------------------------------------------------------------------------------- clients that leave


async def test_a_client_that_leaves_a_stream_frees_every_hop(caplog: pytest.LogCaptureFixture) -> None:
    head, tail = halves(script=[b"a", asyncio.Event()])
    async with api(head, tail) as mesh:
        stream = await mesh.client.chat.completions.create(model="tiny", messages=USER, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content == "a":
                break
        assert len(head.sessions) == len(tail.sessions) == 1
        await stream.close()
        await until(lambda: not head.sessions and not tail.sessions, "every hop is free", timeout_s=1)
        assert head.cancelled.is_set()
        await until(lambda: bool(mesh.routes.ends), "the end is recorded")
        assert mesh.routes.ends[0][1] == FinishCause.CANCELLED
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_frees_every_hop(stream: bool) -> None:
    head, tail = halves(script=[asyncio.Event()])
    async with api(head, tail) as mesh:
        asking = asyncio.create_task(mesh.chat(stream=stream))
        await asyncio.wait_for(head.generating.wait(), 5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not head.sessions and not tail.sessions, "every hop is free", timeout_s=1)
        await until(lambda: bool(mesh.routes.ends), "the end is recorded")
        assert mesh.routes.ends[0][1] == FinishCause.CANCELLED
        await mesh.counted('requests_total{route="/v1/chat/completions",status="499"} 1.0')


async def test_a_client_that_leaves_in_the_middle_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async with api(ShardServer()) as mesh:
        _, writer = await asyncio.open_connection(*_host_port(mesh.url))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\nContent-Length: 99\r\n\r\n"
        )
        writer.write(head.encode() + b'{"model"')
        await writer.drain()
        writer.close()
        await mesh.counted('requests_total{route="/v1/completions",status="499"} 1.0')
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_a_long_prefill_is_bridged_by_comments() -> None:
    gate = asyncio.Event()
    async with api(ShardServer(script=[gate, b"a", LOST]), keepalive_s=0.05) as mesh:
        lines = []
        async with mesh.http.stream("POST", "/v1/chat/completions", json={
            "model": "tiny", "messages": USER, "stream": True
        }) as response:  # fmt: skip
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 3:
                    gate.set()
        # The status line is out, so that the failure is an event.
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "hop_lost"


async def test_the_openai_client_ignores_comments() -> None:
    gate = asyncio.Event()
    async with api(ShardServer(script=[gate, b"a"]), keepalive_s=0.02) as mesh:
        stream = await mesh.client.chat.completions.create(model="tiny", messages=USER, stream=True)
        gate.set()
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["", "a", None]


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    piece = b"x" * 60_000
    head = ShardServer(script=[piece] * 400, session_tokens=1000)
    async with api(head, stall_timeout_s=0.5) as mesh:
        _, writer = await asyncio.open_connection(*_host_port(mesh.url), limit=1024)
        body = json.dumps({"model": "tiny", "messages": USER, "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + API_KEY.encode()
            + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        await asyncio.wait_for(head.generating.wait(), 5)
        await until(lambda: not head.sessions, "the session is given up")
        await until(lambda: bool(mesh.routes.ends), "the end is recorded")
        assert mesh.routes.ends[0][1] == FinishCause.CANCELLED
        writer.close()


def _host_port(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port


# ---------------------------------------------------------------------------------------------------- metrics


async def test_metrics_count_requests_tokens_and_errors() -> None:
    async with api(*halves()) as mesh:
        await mesh.chat()
        await mesh.chat(stream=True)
        await mesh.chat(temperature=9)
        await mesh.http.get("/v1/nothing")
        await mesh.http.get("/v1/models/none")
        text = await mesh.metrics()
    for line in (
        'meshnet_gateway_requests_total{route="/v1/chat/completions",status="200"} 2.0',
        'meshnet_gateway_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        'meshnet_gateway_requests_total{route="other",status="404"} 1.0',
        'meshnet_gateway_errors_total{code="invalid_parameter"} 1.0',
        'meshnet_gateway_errors_total{code="not_found"} 1.0',
        'meshnet_gateway_errors_total{code="model_not_found"} 1.0',
        'meshnet_gateway_generations_total{cause="eog"} 2.0',
        'meshnet_gateway_generations_total{cause="failed"} 0.0',
        'meshnet_gateway_generated_tokens_total{model="tiny"} 8.0',
        'meshnet_gateway_prompt_tokens_total{model="tiny"} 46.0',
        'meshnet_gateway_time_to_first_token_seconds_count{model="tiny"} 2.0',
        'meshnet_gateway_token_interval_seconds_count{model="tiny"} 6.0',
        "meshnet_gateway_running_generations 0.0",
    ):
        assert line in text.splitlines()


async def test_two_gateways_in_one_process_do_not_mix() -> None:
    async with api(ShardServer()) as one, api(ShardServer()) as other:
        await one.chat()
        assert 'generations_total{cause="eog"} 1.0' in await one.metrics()
        assert 'generations_total{cause="eog"} 0.0' in await other.metrics()
