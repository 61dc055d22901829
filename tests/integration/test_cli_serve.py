"""`meshnet serve` as a process: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import httpx
import pytest

from meshnet.rpc.client import WorkerPool
from tests.support.command import environment, finish, line_with, run, start
from tests.support.mesh import API_KEY, DEADLINE_S, Mesh, end, mesh, until


async def test_secrets_are_made_once_shown_and_good(tmp_path: Path) -> None:
    env = environment(tmp_path)
    shown = []
    for _ in range(2):
        process = await start("serve", "--port", "0", env=env)
        api = (await line_with(process.stdout, "API  ")).split()[1]
        key = (await line_with(process.stdout, "API key")).split()[2]
        tracker = (await line_with(process.stdout, "Tracker")).split()[1]
        token = (await line_with(process.stdout, "Join token")).split()[2]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http:
            assert (await http.get(f"{api}/models")).json() == {"object": "list", "data": []}
        status = await run("status", "--tracker", tracker, "--join-token", token, "--json", env=env)
        assert json.loads(status.out)["nodes"] == []
        process.send_signal(signal.SIGTERM)
        ran = await finish(process)
        assert ran.code == 0
        assert key not in ran.err
        assert token not in ran.err
        shown.append((key, token))
    assert shown[0] == shown[1]
    assert (tmp_path / "credentials.json").stat().st_mode & 0o777 == 0o600


async def test_given_secrets_are_not_shown(tmp_path: Path) -> None:
    env = environment(tmp_path, MESHNET_API_KEY="sk-given-by-hand", MESHNET_JOIN_TOKEN="join-given-by-hand")
    process = await start("serve", "--port", "0", env=env)
    first = await line_with(process.stdout, "API  ")
    process.send_signal(signal.SIGINT)
    ran = await finish(process)
    assert ran.code == 0
    everything = first + ran.out + ran.err
    assert "given-by-hand" not in everything
    assert "API key     (from MESHNET_API_KEY)" in everything
    assert "Join token  (from MESHNET_JOIN_TOKEN)" in everything
    assert not (tmp_path / "credentials.json").exists()


async def test_a_second_serve_on_the_same_port_is_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path) as net:
        await net.serve()
        port = net.url.rpartition(":")[2]
        env = environment(tmp_path / "other", **{k: v for k, v in net.environment.items() if k != "MESHNET_STORE"})
        ran = await run("serve", "--port", port, env=env)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (
            f"meshnet: port {port} on 127.0.0.1 is in use; is another `meshnet serve` running? "
            "Choose another with --port\n"
        )
        # The first is not disturbed.
        assert (await net.status()).nodes == ()


async def test_a_second_serve_on_the_same_database_is_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path) as net:
        await net.serve()
        ran = await run("serve", "--port", "0", env=environment(tmp_path, **net.environment))
        assert ran.code == 2
        assert ran.err == f"meshnet: another tracker is running on {tmp_path}/tracker; stop it, or pass --state-dir\n"


async def test_the_tracker_and_the_api_take_only_their_own_secret(tmp_path: Path) -> None:
    async with mesh(tmp_path) as net, httpx.AsyncClient() as http:
        await net.serve()
        for path, secret in (("/tracker/v1/status", API_KEY), ("/v1/models", net.environment["MESHNET_JOIN_TOKEN"])):
            assert (await http.get(net.url + path)).status_code == 401
            answer = await http.get(net.url + path, headers={"authorization": f"Bearer {secret}"})
            assert answer.status_code == 401


async def test_serve_ends_with_its_parent(tmp_path: Path) -> None:
    async with mesh(tmp_path) as net:
        serve = await net.serve()
        assert serve.process.stdin is not None
        serve.process.stdin.close()
        async with asyncio.timeout(DEADLINE_S):
            assert await serve.process.wait() == 0


async def test_ending_with_a_parent_needs_a_pipe(tmp_path: Path) -> None:
    # A regular file is never "closed by the parent".
    (tmp_path / "input").write_text("")
    import sys

    with (tmp_path / "input").open() as stdin:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "meshnet.cli", "serve", "--port", "0", "--exit-with-parent"),
            stdin=stdin,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment(tmp_path),
        )
        _, err = await process.communicate()
    assert process.returncode == 2
    assert err.decode().splitlines()[-1] == "meshnet: --exit-with-parent needs a pipe on standard input"


async def refuses(url: str) -> bool:
    async with httpx.AsyncClient() as http:
        try:
            await http.get(f"{url}/health")
        except httpx.ConnectError:
            return True
    return False


async def endless_answer(net: Mesh, begun: asyncio.Event) -> bool:
    """Ask for a very long answer; True if it was cut off."""
    request = {
        "model": "test:8:2000",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    try:
        async with (
            httpx.AsyncClient(headers={"authorization": f"Bearer {API_KEY}"}, timeout=DEADLINE_S) as http,
            http.stream("POST", f"{net.url}/v1/chat/completions", json=request) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    begun.set()
                if "[DONE]" in line:
                    return False
    except httpx.HTTPError:
        return True
    return True


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_running_answer_does_not_keep_serve_up(tmp_path: Path, signals: int) -> None:
    async with mesh(tmp_path) as net:
        serve = await net.serve()
        node = await net.start_node("all", "--model", "test:8:2000")
        await net.offered((await node.event(DEADLINE_S))["shard"]["shard_id"])
        begun = asyncio.Event()
        asking = asyncio.create_task(endless_answer(net, begun))
        await begun.wait()
        (shard,) = (await net.shards()).values()
        stopped_at = time.monotonic()
        serve.process.send_signal(signal.SIGTERM)
        if signals == 2:
            # Apart, or the kernel would make one of them: once it has stopped listening, it has seen the first.
            await until("serve has stopped listening", lambda: refuses(net.url))
            serve.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await serve.process.wait() == 0
        took_s = time.monotonic() - stopped_at
        # After a single request answers get 10 s to end; this one would take a minute.
        assert took_s < 9 if signals == 2 else 9 < took_s < 30
        assert await asking
        # Nothing is left behind on the worker.
        async with WorkerPool() as pool:
            assert (await pool.worker(shard.address).status()).open_sessions == 0


async def test_serve_restarts_on_its_port_at_once(tmp_path: Path) -> None:
    async with mesh(tmp_path) as net:
        serve = await net.serve()
        first = net.url
        async with httpx.AsyncClient() as http:
            await http.get(f"{net.url}/health")
            assert await end(serve) == 0
            await net.serve()

            async def healthy() -> bool:
                return (await http.get(f"{net.url}/health")).status_code == 200

            await until("the new one answers", healthy)
        assert net.url == first
