"""The unmodified ``openai`` client against a gateway and real workers, over routes of one to three hops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.integration.gateway_fixtures import MODEL, SLOW, Mesh, mesh
from tests.support.gateway_server import until

USER: Any = [{"role": "user", "content": "hello"}]
ROUTES = {"one": ("0:8",), "two": ("0:3", "3:8"), "three": ("0:2", "2:5", "5:8")}


@pytest_asyncio.fixture(params=ROUTES.values(), ids=ROUTES.keys())
async def route(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    async with mesh(*request.param) as running:
        yield running


async def text(mesh: Mesh, prompt: str = "hello", **fields: Any) -> str:
    answer = await mesh.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], **fields
    )
    return answer.choices[0].message.content or ""


async def streamed(mesh: Mesh, **fields: Any) -> tuple[str, list[Any]]:
    stream: Any = await mesh.client.chat.completions.create(model=MODEL, messages=USER, stream=True, **fields)
    chunks = [chunk async for chunk in stream]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


async def test_answers_whole_and_streamed_are_equal(route: Mesh) -> None:
    whole = await route.client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=60)
    streaming, chunks = await streamed(route, temperature=0, max_tokens=60, stream_options={"include_usage": True})
    assert streaming == whole.choices[0].message.content
    assert streaming
    assert whole.usage == chunks[-1].usage
    prompt_tokens = 1 + len("[user] hello\n[assistant] ")  # BOS, then bytes
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == prompt_tokens
    assert whole.usage.completion_tokens == len(streaming) + (whole.choices[0].finish_reason == "stop")

    telemetry = chunks[-2].meshnet
    assert telemetry["prompt_tokens"] == prompt_tokens
    assert telemetry["generated_tokens"] == whole.usage.completion_tokens
    assert telemetry["missing_hops"] == []
    assert [hop["layers"] for hop in telemetry["hops"]] == [str(worker.shard.layers) for worker in route.workers]
    for hop in telemetry["hops"]:
        assert hop["prefill_tokens"] == prompt_tokens
        assert hop["decode_tokens"] == whole.usage.completion_tokens - 1
        assert hop["compute_ms"] >= 0
    if len(route.workers) > 1:
        assert all(hop["bytes_out"] > 0 and hop["bytes_in"] > 0 for hop in telemetry["hops"])
    await route.idle()


async def test_every_route_says_the_same() -> None:
    answers = set()
    for layers in ROUTES.values():
        async with mesh(*layers) as running:
            answers.add(await text(running, temperature=0, max_tokens=40))
    assert len(answers) == 1


async def test_completions_of_text_and_of_tokens(route: Mesh) -> None:
    create = route.client.completions.create
    by_text = await create(model=MODEL, prompt="hello", temperature=0, max_tokens=20)
    by_tokens = await create(model=MODEL, prompt=[256, *b"hello"], temperature=0, max_tokens=20)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_text.choices[0].text
    stream = await create(model=MODEL, prompt="hello", temperature=0, max_tokens=20, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == by_text.choices[0].text


async def test_stop_strings_over_token_borders(route: Mesh) -> None:
    """Every token of the test engine is one byte, so any longer stop string lies over several tokens."""
    whole = await text(route, temperature=0, max_tokens=60, extra_body={"ignore_eos": True})
    assert len(whole) > 30
    stop = whole[10:15]
    before = whole[: whole.index(stop)]
    answer = await route.client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=60, stop=[stop, "not in there"]
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (before, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(before) + 5
    telemetry: Any = answer.model_extra
    assert telemetry["meshnet"]["finish_cause"] == "stop"
    streaming, chunks = await streamed(route, temperature=0, max_tokens=60, stop=stop)
    assert (streaming, chunks[-1].choices[0].finish_reason) == (before, "stop")
    await route.idle()


async def test_the_length_ends_an_answer(route: Mesh) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = await route.client.chat.completions.create(
            model=MODEL, messages=USER, extra_body={"ignore_eos": True, **limit}
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5


async def test_without_a_limit_an_answer_fills_the_session(route: Mesh) -> None:
    response = await route.chat(ignore_eos=True, logit_bias={"257": -100})
    body = response.json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 512


async def test_seeds_reproduce(route: Mesh) -> None:
    hot: dict[str, Any] = {"temperature": 1.5, "max_tokens": 40}
    answers = {seed: await text(route, seed=seed, **hot) for seed in (1, 2, -1, 2**40)}
    assert len(set(answers.values())) == len(answers)
    for seed, answer in answers.items():
        assert await text(route, seed=seed, **hot) == answer
    # Without a seed, answers differ.
    assert len({await text(route, **hot) for _ in range(4)}) > 1


async def test_logprobs_are_aligned(route: Mesh) -> None:
    answer = await route.client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=20, logprobs=True, top_logprobs=4
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.bytes == list(entry.token.encode())
        assert len(entry.top_logprobs) == 4
        # Greedy takes the most likely token.
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob < 0
        ranks = [top.logprob for top in entry.top_logprobs]
        assert ranks == sorted(ranks, reverse=True)
    _, chunks = await streamed(route, temperature=0, max_tokens=20, logprobs=True, top_logprobs=4)
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.model_dump() for entry in entries] == [entry.model_dump() for entry in choice.logprobs.content]
    plain = await route.client.completions.create(model=MODEL, prompt="hello", temperature=0, max_tokens=5, logprobs=2)
    assert plain.choices[0].logprobs is not None
    assert "".join(plain.choices[0].logprobs.tokens or ()) == plain.choices[0].text


async def test_logit_bias_and_truncation_reach_the_sampler(route: Mesh) -> None:
    assert await text(route, max_tokens=6, logit_bias={str(ord("z")): 100}) == "zzzzzz"
    greedy = await text(route, temperature=0, max_tokens=20)
    assert await text(route, temperature=2, top_p=0, max_tokens=20) == greedy
    assert await text(route, temperature=2, max_tokens=20, extra_body={"top_k": 1}) == greedy


async def test_characters_of_several_tokens_are_whole(route: Mesh) -> None:
    """A repeated lead byte is no character; each becomes one U+FFFD, streamed or not."""
    lead = {str(0xF0): 100}
    assert await text(route, max_tokens=3, logit_bias=lead) == "\ufffd" * 3
    assert (await streamed(route, max_tokens=3, logit_bias=lead))[0] == "\ufffd" * 3


async def test_errors_of_requests(route: Mesh) -> None:
    create = route.client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="huge"):
        await create(model="huge", messages=USER)
    with pytest.raises(openai.BadRequestError, match="holds 512 tokens, but the prompt has") as long:
        await create(model=MODEL, messages=[{"role": "user", "content": "x" * 600}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=USER, top_p=7)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="token 300 is not"):
        await route.client.completions.create(model=MODEL, prompt=[300])
    with pytest.raises(openai.AuthenticationError):
        await route.client.with_options(api_key="x").models.list()
    assert [status.open_sessions for status in await route.status()] == [0] * len(route.workers)


async def test_models(route: Mesh) -> None:
    assert [model.id async for model in route.client.models.list()] == [MODEL]


async def test_more_sessions_than_slots_is_overload() -> None:
    async with mesh("0:4", "4:8", model=SLOW, sessions=1) as running:
        stream = await running.client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        with pytest.raises(openai.RateLimitError) as full:
            await running.client.chat.completions.create(model=MODEL, messages=USER)
        assert full.value.response.headers["retry-after"] == "1"
        await stream.close()
        await running.idle()
        assert await text(running, max_tokens=3)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_every_worker(stream: bool) -> None:
    async with mesh("0:3", "3:6", "6:8", model=SLOW) as running:
        if stream:
            answer = await running.client.chat.completions.create(
                model=MODEL, messages=USER, stream=True, extra_body={"ignore_eos": True}
            )
            async for chunk in answer:
                if chunk.choices[0].delta.content:
                    break
            assert [status.open_sessions for status in await running.status()] == [1, 1, 1]
            await answer.close()
        else:
            asking = asyncio.create_task(running.chat(ignore_eos=True))
            await until(lambda: bool(running.routes.open_sessions), "the session begins")
            await running.wait_for_sessions(1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await running.idle(timeout_s=1)
        await until(lambda: not running.routes.open_sessions, "the end is recorded")


async def test_twenty_sessions_at_once_say_what_each_says_alone() -> None:
    async with mesh("0:3", "3:6", "6:8", sessions=20) as running:
        wanted: list[dict[str, Any]] = [
            {
                "prompt": f"question {number} " * (1 + number % 5),
                "temperature": 0 if number % 2 else 1.2,
                "seed": number,
                "max_tokens": 20 + number,
            }
            for number in range(20)
        ]
        alone = [await text(running, **each) for each in wanted]
        together = await asyncio.gather(*(text(running, **each) for each in wanted))
        assert together == alone
        assert len(set(alone)) == 20
