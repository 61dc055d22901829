"""A worker is killed in mid-stream: a named error soon, the gateway goes on, the agent brings the worker back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.real_mesh import MODEL, real_mesh
from tests.support.mesh import until, worker_pid

QUESTION: Any = [{"role": "user", "content": "Tell me a long story."}]


async def read_to_the_end(stream: Any) -> None:
    async for chunk in stream:
        assert chunk.choices[0].finish_reason is None


@pytest.mark.parametrize("victim", [0, 1], ids=["head", "tail"])
async def test_kill_in_mid_stream(tmp_path: Path, victim: int) -> None:
    async with real_mesh(tmp_path, "0:15", "15:30") as running, running.openai() as client:
        node = running.started._started[1 + victim]
        layers = ("0:15", "15:30")[victim]
        (shard_id,) = [shard.shard_id for shard in (await running.shards()).values() if str(shard.layers) == layers]
        stream: Any = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
        )
        texts = 0
        async for chunk in stream:
            texts += bool(chunk.choices[0].delta.content)
            if texts == 5:
                break
        os.kill(worker_pid(node), signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(openai.APIError, match=shard_id) as lost:
            await read_to_the_end(stream)
        assert time.monotonic() - killed < 3
        body: Any = lost.value.body
        assert body["hop"] == {"shard": shard_id, "index": victim}

        # The gateway serves on, and the next request works once the agent has brought the worker back.
        async with running.openai() as other:
            await other.models.list()

        async def answered() -> bool:
            try:
                answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5)
            except openai.InternalServerError:  # 502 or 503 until the worker is back
                return False
            return bool(answer.choices[0].message.content)

        await until("the next request is answered", answered)
        await running.idle()
