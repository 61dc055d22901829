"""How sessions end in a mesh of real processes: work in the ledger, and a gateway that vanishes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from meshnet.cli.children import Child
from meshnet.rpc.client import WorkerPool
from meshnet.tracker.database_url import sqlite_url
from tests.support import schema
from tests.support.command import environment, run
from tests.support.mesh import API_KEY, DEADLINE_S, MODEL, Mesh, mesh, until

LONG_MODEL = "test:8:2000"
HEADERS = {"authorization": f"Bearer {API_KEY}"}


def request(model: str, *, max_tokens: int, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}


async def database(net: Mesh, query: str) -> list[tuple[Any, ...]]:
    return await schema.rows(sqlite_url(net.directory / "tracker" / "tracker.sqlite3"), query)


async def test_the_ledger_tells_what_every_node_did(tmp_path: Path) -> None:
    async with mesh(tmp_path) as net:
        await net.serve()
        for layers in ("0:3", "3:8"):
            await net.node(layers)
        async with httpx.AsyncClient(headers=HEADERS, timeout=DEADLINE_S) as http:
            url = f"{net.url}/v1/chat/completions"
            answers = [
                (await http.post(url, json=request(MODEL, max_tokens=tokens, stream=False))).json() for tokens in (5, 9)
            ]
        prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers)

        async def recorded() -> bool:
            return await database(net, "SELECT count(*) FROM ledger") == [(4,)]

        await until("both ends are recorded", recorded)
        ran = await run("ledger", "--tracker", net.url, "--json", env=environment(tmp_path, **net.environment))
        summary = json.loads(ran.out)
        assert len(summary["lines"]) == 2
        for line in summary["lines"]:
            assert (line["sessions"], line["hops"], line["unmeasured_hops"]) == (2, 2, 0)
            assert line["prefill_tokens"] == prompt
            # The last token of an answer is sampled, and computed by nobody.
            assert line["decode_tokens"] == 5 + 9 - 2
            assert line["bytes_in"] > 0
        computed = prompt + 5 + 9 - 2
        assert sorted(line["layer_tokens"] for line in summary["lines"]) == [3 * computed, 5 * computed]
        assert summary["total"]["sessions"] == 2


async def start_gateway(net: Mesh) -> tuple[Child, str]:
    arguments = ["serve", "--gateway-only", "--tracker", net.url, "--port", "0", "--json"]
    child = await net.started.start("gateway", arguments, net.environment)
    return child, (await child.event(DEADLINE_S))["url"]


async def read_answer(url: str, begun: asyncio.Event) -> None:
    """Read an endless answer until its gateway is gone."""
    async with httpx.AsyncClient(headers=HEADERS, timeout=DEADLINE_S) as http:
        body = request(LONG_MODEL, max_tokens=4000, stream=True)
        try:
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    begun.set()
        except httpx.HTTPError:
            return
    raise AssertionError("the answer came to an end")


async def test_a_gateway_that_vanishes_leaves_nothing_behind(tmp_path: Path) -> None:
    async with mesh(tmp_path) as net:
        await net.serve("--tracker-only", "--session-lease-s", "3")
        shards = []
        for layers in ("0:3", "3:8"):
            node = await net.start_node(layers, "--model", LONG_MODEL)
            shards.append((await node.event(DEADLINE_S))["shard"])
            await net.offered(shards[-1]["shard_id"])

        async def ready() -> bool:
            return all(shard.ready for shard in (await net.shards()).values())

        await until("the shards are ready", ready)
        gateway, url = await start_gateway(net)
        begun = asyncio.Event()
        reading = asyncio.create_task(read_answer(url, begun))
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
        assert (await net.status()).open_sessions == 1
        os.kill(gateway.process.pid, signal.SIGKILL)
        await gateway.process.wait()
        await reading

        async def given_up() -> bool:
            return (await net.status()).open_sessions == 0

        await until("the tracker gives the session up", given_up)
        assert await database(net, "SELECT state, finish_cause FROM sessions") == [("orphaned", None)]
        async with WorkerPool() as pool:

            async def freed() -> bool:
                workers = [pool.worker(shard["address"]) for shard in shards]
                return not any([(await worker.status()).open_sessions for worker in workers])

            await until("the workers free it", freed)
        # The next gateway finds all as it should be.
        _, url = await start_gateway(net)
        async with httpx.AsyncClient(headers=HEADERS, timeout=DEADLINE_S) as http:
            answer = await http.post(f"{url}/v1/chat/completions", json=request(LONG_MODEL, max_tokens=3, stream=False))
        assert answer.status_code == 200
