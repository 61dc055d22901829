"""Workers that die in the middle of an answer and have no spare: the client is told which, soon; all else goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import openai
import pytest

from tests.integration.gateway_fixtures import MODEL, SLOW, Mesh, mesh, start_worker, static_routes

USER: Any = [{"role": "user", "content": "hello"}]
ENDLESS: dict[str, Any] = {"ignore_eos": True}
LAYERS = ("0:3", "3:6", "6:8")


async def begin(running: Mesh, tokens: int = 3) -> Any:
    """A stream that has given some text."""
    stream = await running.client.chat.completions.create(model=MODEL, messages=USER, stream=True, extra_body=ENDLESS)
    texts = 0
    async for chunk in stream:
        texts += bool(chunk.choices[0].delta.content)
        if texts == tokens:
            return stream
    raise AssertionError("the answer ended by itself")


async def read_to_the_end(stream: Any) -> None:
    async for chunk in stream:
        assert chunk.choices[0].finish_reason is None


@pytest.mark.parametrize("victim", range(len(LAYERS)), ids=["head", "middle", "tail"])
async def test_a_killed_worker_is_named_within_three_seconds(victim: int) -> None:
    async with mesh(*LAYERS, model=SLOW) as running:
        stream = await begin(running)
        shard_id = running.workers[victim].shard_id
        await running.kill(victim)
        killed = time.monotonic()
        with pytest.raises(openai.APIError, match=shard_id) as lost:
            await read_to_the_end(stream)
        took_s = time.monotonic() - killed
        assert took_s < 3
        body: Any = lost.value.body
        assert (body["code"], body["hop"]) == ("hop_lost", {"shard": shard_id, "index": victim})
        # The survivors are free for the next session.
        await running.idle()

        # The gateway goes on: without a route it says so, and with the worker back it answers.
        with pytest.raises(openai.APIStatusError) as refused:
            await running.client.chat.completions.create(model=MODEL, messages=USER)
        assert refused.value.status_code in (502, 503)
        assert (await running.http.get("/health")).status_code == 200
        running.workers[victim] = await start_worker(LAYERS[victim], model=SLOW, shard_id=shard_id)
        try:
            replacement = static_routes(running.workers)
            running.routes.shards, running.routes.worker_keys = replacement.shards, replacement.worker_keys
            answer = await running.client.chat.completions.create(model=MODEL, messages=USER, max_tokens=3)
            assert answer.choices[0].message.content
            await running.idle()
        finally:
            await running.kill(victim)


@pytest.mark.parametrize("victim", [0, 2], ids=["head", "tail"])
async def test_a_frozen_worker_is_lost_long_before_any_step_timeout(victim: int) -> None:
    """A machine that hangs keeps its connections; only unanswered pings tell."""
    async with mesh(*LAYERS, model=SLOW, settings={"step_timeout_s": 60.0}) as running:
        stream = await begin(running)
        shard_id = running.workers[victim].shard_id
        os.kill(running.workers[victim].pid, signal.SIGSTOP)
        with pytest.raises(openai.APIError, match=shard_id):
            await asyncio.wait_for(read_to_the_end(stream), 8)
        await running.kill(victim)
        await running.idle()


@pytest.mark.parametrize("victim", [0, 2], ids=["head", "tail"])
async def test_a_killed_worker_fails_an_unstreamed_answer(victim: int) -> None:
    async with mesh(*LAYERS, model=SLOW) as running:
        asking = asyncio.create_task(running.chat(**ENDLESS))
        await running.wait_for_sessions(1)
        await running.kill(victim)
        response = await asyncio.wait_for(asking, 3)
        assert response.status_code == 502
        assert response.json()["error"]["hop"] == {"shard": running.workers[victim].shard_id, "index": victim}
        assert running.workers[victim].shard_id in response.json()["meshnet"]["missing_hops"]
        assert len(response.json()["meshnet"]["hops"]) == 2


async def test_one_lost_route_does_not_touch_another() -> None:
    """Two routes share the head; the tail of one dies. Its answer goes on over the other's tail."""
    async with mesh("0:4", "4:8", model=SLOW) as running:
        spare = await start_worker("4:8", model=SLOW, shard_id="spare")
        running.workers.append(spare)
        try:
            first = await begin(running)
            replacement = static_routes([running.workers[0], spare])
            running.routes.shards, running.routes.worker_keys = replacement.shards, replacement.worker_keys
            second = await begin(running)
            await running.kill(1)
            # Both answers still come: ten more texts of each.
            for stream in (second, first):
                texts = 0
                async for chunk in stream:
                    texts += bool(chunk.choices[0].delta.content)
                    if texts == 10:
                        break
                await stream.close()
            await running.idle()
        finally:
            await running.kill(2)
