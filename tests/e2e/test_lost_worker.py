"""A worker is killed in mid-stream: its agent brings it back, the route is repaired, and the answer goes on."""

from __future__ import annotations

import os
import signal
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
