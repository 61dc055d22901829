"""Real workers (test engine) with spares: whichever is lost, whenever, the answer is that of an unbroken route."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from meshnet.node.worker import Worker
from tests.integration.gateway_fixtures import MODEL, SLOW, Mesh, mesh

LAYERS = ("0:3", "3:6", "6:8")
USER: Any = [{"role": "user", "content": "hello, and a prompt of some length " * 4}]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 3, "frequency_penalty": 0.4},
}


@asynccontextmanager
async def spared_mesh() -> AsyncIterator[Mesh]:
    """Three hops; the first three workers are the route, the last three the spares."""
    settings = {"repair_timeout_s": 20.0}
    async with mesh(*LAYERS, *LAYERS, model=SLOW, settings=settings) as running:
        yield running


async def say(running: Mesh, sampling: dict[str, Any], on_text: Callable[[int], None] = lambda n: None) -> Any:
    """Texts with their log-probabilities, and the telemetry."""
    stream = await running.client.chat.completions.create(
        model=MODEL,
        messages=USER,
        stream=True,
        max_tokens=40,
        logprobs=True,
        extra_body={"ignore_eos": True},
        **sampling,
    )
    said: list[tuple[str, list[float]]] = []
    telemetry: dict[str, Any] = {}
    async for chunk in stream:
        choice = chunk.choices[0]
        if choice.delta.content or choice.logprobs:
            said.append((choice.delta.content, [token.logprob for token in choice.logprobs.content]))
            on_text(len(said))
        telemetry = (chunk.model_extra or {}).get("meshnet") or telemetry
    assert choice.finish_reason == "length"
    return said, telemetry


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("victim", range(3), ids=["head", "middle", "tail"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["crash", "hang"])
async def test_the_answer_goes_on(fault: signal.Signals, victim: int, sampling: str) -> None:
    async with spared_mesh() as running:
        undisturbed, telemetry = await say(running, SAMPLING[sampling])
        assert telemetry["repairs"] == []
        worker = running.workers[victim]

        def hit(texts: int) -> None:
            if texts == 7:
                os.kill(worker.pid, fault)

        disturbed, telemetry = await asyncio.wait_for(say(running, SAMPLING[sampling], hit), 30)
        assert disturbed == undisturbed
        [repair] = telemetry["repairs"]
        assert (repair["cause"], repair["hop"]) == ("hop_lost", worker.shard_id)
        assert repair["detect_ms"] < (1000 if fault == signal.SIGKILL else 5000)
        assert telemetry["epoch"] == 2
        spare = running.workers[3 + victim].shard_id
        assert spare in [hop["shard"] for hop in telemetry["hops"]]
        await running.kill(victim)
        await running.idle()
        for status in await running.status():
            assert status.kv_tokens == 0
        # Hops behind the lost one kept what they held.
        assert (repair["kept_layer_tokens"] > 0) == (victim < 2)


async def test_two_at_once() -> None:
    async with spared_mesh() as running:
        undisturbed, _ = await say(running, SAMPLING["seeded"])
        victims: list[Worker] = [running.workers[0], running.workers[2]]

        def hit(texts: int) -> None:
            if texts == 5:
                for worker in victims:
                    os.kill(worker.pid, signal.SIGKILL)

        disturbed, telemetry = await asyncio.wait_for(say(running, SAMPLING["seeded"], hit), 30)
        assert disturbed == undisturbed
        assert len(telemetry["repairs"]) in (1, 2)
        for index in (0, 2):
            await running.kill(index)
        await running.idle()
