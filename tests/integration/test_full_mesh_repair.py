"""A route breaks while all slots of the mesh are taken: no probe of a replacement finds one; answers go on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.support.mesh import API_KEY, mesh, worker_pid

#: 8 layers, 2 ms each.
SLOW = "test:8:2000"
SLOTS = 2
USER: Any = [{"role": "user", "content": "hello"}]


async def test_sessions_that_wait_for_a_repair_do_not_keep_it_from_coming(tmp_path: Path) -> None:
    async with mesh(tmp_path) as running:
        await running.serve("--repair-timeout-s", "30")
        options = ("--model", SLOW, "--model-name", "slow", "--sessions", str(SLOTS), "--context", "512")
        await running.node("0:4", *options)
        tail = await running.node("4:8", *options)
        [head_id] = [shard_id for shard_id, shard in (await running.shards()).items() if shard.layers.start == 0]
        await running.shard_ready(head_id)
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key=API_KEY, max_retries=0, timeout=60) as client:
            both = asyncio.Event()
            telling: set[int] = set()

            async def tell(number: int) -> dict[str, Any]:
                stream: Any = await client.chat.completions.create(
                    model="slow", messages=USER, stream=True, max_tokens=100, extra_body={"ignore_eos": True}
                )
                telemetry: dict[str, Any] = {}
                async for chunk in stream:
                    telling.add(number)
                    if len(telling) == SLOTS:
                        both.set()
                    telemetry = (chunk.model_extra or {}).get("meshnet") or telemetry
                return telemetry

            answers = [asyncio.create_task(tell(number)) for number in range(SLOTS)]
            await asyncio.wait_for(both.wait(), 30)
            os.kill(worker_pid(tail), signal.SIGKILL)
            for telemetry in await asyncio.wait_for(asyncio.gather(*answers), 50):
                assert telemetry["generated_tokens"] == 100
                assert [repair["cause"] for repair in telemetry["repairs"]] == ["hop_lost"]
