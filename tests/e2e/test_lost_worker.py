"""A worker is killed in mid-stream: its agent brings it back, the route is repaired, and the answer goes on. Without
repair, the client is told at once which hop was lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from meshnet.core import Telemetry
from tests.e2e.real_mesh import MODEL, real_mesh
from tests.support.mesh import worker_pid

QUESTION: Any = [{"role": "user", "content": "Tell me a long story."}]


async def tell(client: openai.AsyncOpenAI, kill_at: int | None, pid: int) -> tuple[str, Telemetry]:
    """The story and its telemetry; the process is killed after ``kill_at`` texts."""
    stream: Any = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, max_tokens=60, temperature=0.8, seed=11
    )
    texts: list[str] = []
    telemetry = None
    async for chunk in stream:
        if text := chunk.choices[0].delta.content:
            texts.append(text)
            if len(texts) == kill_at:
                os.kill(pid, signal.SIGKILL)
        telemetry = (chunk.model_extra or {}).get("meshnet") or telemetry
    return "".join(texts), Telemetry.model_validate(telemetry)


async def unfinished(stream: Any) -> None:
    """Read to the end; no part may say that the answer is complete."""
    async for chunk in stream:
        assert chunk.choices[0].finish_reason is None


@pytest.mark.parametrize("victim", [0, 1], ids=["head", "tail"])
async def test_kill_in_mid_stream(tmp_path: Path, victim: int) -> None:
    async with real_mesh(tmp_path, "0:15", "15:30") as running, running.openai() as client:
        pid = worker_pid(running.started._started[1 + victim])
        undisturbed, telemetry = await tell(client, None, pid)
        assert telemetry.repairs == ()
        story, telemetry = await tell(client, 5, pid)
        assert story == undisturbed
        assert [repair.cause for repair in telemetry.repairs] == ["hop_lost"]
        assert telemetry.finish_cause == "length"
        assert telemetry.generated_tokens == 60
        await running.idle()


@pytest.mark.parametrize("victim", [0, 1], ids=["head", "tail"])
async def test_without_repair_the_lost_hop_is_named_within_three_seconds(tmp_path: Path, victim: int) -> None:
    no_repair = ("--repair-timeout-s", "0")
    async with real_mesh(tmp_path, "0:15", "15:30", serve=no_repair) as running, running.openai() as client:
        (shard_id,) = [id for id, shard in (await running.shards()).items() if (shard.layers.start > 0) == victim]
        pid = worker_pid(running.started._started[1 + victim])
        stream: Any = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, max_tokens=200, temperature=0.8, seed=11
        )
        for _ in range(5):
            await anext(stream)
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(openai.APIError, match=shard_id) as lost:
            await unfinished(stream)
        assert time.monotonic() - killed_s < 3
        body: Any = lost.value.body
        assert (body["code"], body["hop"]) == ("hop_lost", {"shard": shard_id, "index": victim})
        # Its agent starts another, and the next request works.
        await running.withdrawn(shard_id)
        await running.served()
        _, telemetry = await tell(client, None, pid)
        assert (telemetry.generated_tokens, telemetry.repairs) == (60, ())
        await running.idle()
