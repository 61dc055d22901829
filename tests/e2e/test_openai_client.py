"""The unmodified ``openai`` client against SmolLM2 over real workers: everything a user of the API does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.real_mesh import MODEL, RealMesh, real_mesh

HALVES = ("0:15", "15:30")
QUESTION: Any = [{"role": "user", "content": "Name three colours of the rainbow and say why the sky is blue."}]


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **fields})


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, list[Any]]:
    stream: Any = await whole(client, stream=True, **fields)
    chunks = [chunk async for chunk in stream]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


async def test_the_script_of_a_user(tmp_path: Path) -> None:
    async with real_mesh(tmp_path, *HALVES) as running, running.openai() as client:
        await chat_and_streaming(client)
        await completions_and_stop(client)
        await logprobs_and_seeds(client)
        await errors(running, client)
        await disconnect(running, client)


async def chat_and_streaming(client: openai.AsyncOpenAI) -> None:
    answer = await whole(client, temperature=0, max_tokens=60)
    text, chunks = await streamed(client, temperature=0, max_tokens=60, stream_options={"include_usage": True})
    assert text == answer.choices[0].message.content
    assert "rainbow" in text
    assert chunks[-1].usage == answer.usage
    telemetry = answer.model_extra["meshnet"]
    assert telemetry["generated_tokens"] == answer.usage.completion_tokens
    assert telemetry["ttft_ms"] > 0
    assert [hop["layers"] for hop in telemetry["hops"]] == list(HALVES)
    for hop in telemetry["hops"]:
        assert hop["prefill_tokens"] == answer.usage.prompt_tokens
        assert hop["compute_ms"] > 0
        assert hop["bytes_in"] > 0
        assert hop["bytes_out"] > 0


async def completions_and_stop(client: openai.AsyncOpenAI) -> None:
    prompt = "The capital of France is"
    completion = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24)
    text = completion.choices[0].text
    assert "Paris" in text
    # A stop string that begins and ends inside words lies over several tokens.
    stop = text[9:14]
    before = text[: text.index(stop)]
    stopped = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=24, stop=[stop])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (before, "stop")


async def logprobs_and_seeds(client: openai.AsyncOpenAI) -> None:
    answer = await whole(client, temperature=0, max_tokens=12, logprobs=True, top_logprobs=4)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        best = entry.top_logprobs[0]
        assert len(entry.top_logprobs) == 4
        assert (best.token, best.logprob) == (entry.token, entry.logprob)  # greedy takes the most likely

    hot: dict[str, Any] = {"temperature": 1.3, "max_tokens": 30}
    first, again, other = [(await whole(client, seed=seed, **hot)).choices[0].message.content for seed in (7, 7, 8)]
    assert first == again
    assert first != other


async def errors(running: RealMesh, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        await whole(client, model="nobody")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await whole(client, temperature=9)
    long: Any = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError, match="1024") as too_long:
        await whole(client, messages=long)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        await whole(client.with_options(api_key="wrong"))
    await running.idle()


async def disconnect(running: RealMesh, client: openai.AsyncOpenAI) -> None:
    stream: Any = await whole(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert await running.open_sessions() == [1, 1]
    await stream.close()
    await running.idle(deadline_s=1.0)


async def test_every_split_gives_the_same_tokens_and_logprobs(tmp_path: Path) -> None:
    """Real workers and sockets: routes of one, two and four shards, to the last bit of every log-probability."""
    routes = (("0:30",), HALVES, ("0:4", "4:11", "11:26", "26:30"))
    answers = []
    for index, layers in enumerate(routes):
        directory = tmp_path / str(index)
        directory.mkdir()
        async with real_mesh(directory, *layers) as running, running.openai() as client:
            answer = await whole(client, temperature=0, max_tokens=64, logprobs=True, top_logprobs=5)
            content = answer.choices[0].logprobs.content
            answers.append([(entry.token, entry.logprob, entry.top_logprobs) for entry in content])
            long: Any = [{"role": "user", "content": "Count: " + " ".join(str(n) for n in range(150))}]
            answer = await whole(client, messages=long, temperature=0, max_tokens=16, logprobs=True)
            content = answer.choices[0].logprobs.content
            answers[-1] += [(entry.token, entry.logprob, entry.top_logprobs) for entry in content]
    assert len(answers[0]) > 40
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


async def test_twenty_sessions_at_once_say_what_each_says_alone(tmp_path: Path) -> None:
    topics = ["rain", "bread", "the moon", "a dog", "iron", "music", "salt", "a bridge", "tea", "snow"]
    prompts = [f"{start} {topic}" for topic in topics for start in ("Tell me about", "Write one line on")]
    async with real_mesh(tmp_path, *HALVES, context=256, sessions=20) as running, running.openai() as client:

        async def ask(prompt: str) -> tuple[str, int]:
            answer = await whole(
                client, messages=[{"role": "user", "content": prompt}], temperature=0.7, seed=5, max_tokens=24
            )
            return answer.choices[0].message.content, answer.usage.completion_tokens

        async def most_open() -> int:
            """The most sessions that a worker had open at once, until all have ended."""
            most = 0
            while any(counts := await running.open_sessions()) or not most:
                most = max(most, *counts)
            return most

        alone = [await ask(prompt) for prompt in prompts]
        await running.idle()
        counting = asyncio.create_task(most_open())
        together = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        assert together == alone
        # Not one after the other.
        assert await counting >= 15
        assert len({text for text, _ in alone}) > 10
        await running.idle()
