"""`meshnet demo` from end to end (test engine), and that it leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from meshnet.artifact.create import create_bundle
from meshnet.artifact.pieces import share
from meshnet.artifact.samples import DEFAULT_SAMPLE, fetch_sample
from meshnet.artifact.store import store_root
from tests.support.command import environment, finish, line_with, none_left, processes_of, run, start

DEMO = ("demo", "--engine", "test", "--max-tokens", "8")


def left_in(store: Path) -> set[str]:
    return {path.name for path in store.iterdir()}


def demos_in(store: Path) -> list[str]:
    return [name for name in left_in(store) if name.startswith("demo-")]


def arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def test_the_demo_asks_and_shows_every_hop(tmp_path: Path) -> None:
    ran = await run(*DEMO, "Why is the sky blue?", env=environment(tmp_path))
    assert (ran.code, ran.err) == (0, "")
    assert "> Why is the sky blue?\n" in ran.out
    assert re.search(r"\d+ prompt \+ \d+ generated tokens, first after \d+ ms", ran.out)
    hops = [line.split()[:2] for line in ran.out.splitlines() if re.search(r"/\d-\d\.", line)]
    assert [layers for _, layers in hops] == ["0:4", "4:8"]
    # Two nodes, not two shards of one.
    assert len({shard.partition("/")[0] for shard, _ in hops}) == 2
    await none_left(tmp_path)
    # The store holds no trace but what the next run can use.
    assert not {"credentials.json", "tracker"} & left_in(tmp_path)
    assert not demos_in(tmp_path)


async def test_the_demo_runs_a_real_model() -> None:
    # In the machine's own store, where `make models` puts the model.
    store = store_root()
    before = left_in(store)
    ran = await run("demo", "--max-tokens", "24", env=environment(store))
    assert (ran.code, ran.err) == (0, "")
    assert "Rayleigh scattering" in ran.out
    hops = [line.split()[1] for line in ran.out.splitlines() if re.search(r"/\d+-\d+\.", line)]
    assert hops == ["0:15", "15:30"]
    # Each node fetched its half (the embedding is at both ends), and the store is as it was before.
    artifact = create_bundle(fetch_sample(DEFAULT_SAMPLE)).artifact
    fetched = dict(re.findall(r"^  (node \d): ([\d.]+) of \2 MB$", ran.out, re.MULTILINE))
    for node, layers in zip(("node 1", "node 2"), artifact.divided(2), strict=True):
        assert float(fetched[node]) == pytest.approx(share(artifact, layers).fetched_bytes / 1e6, abs=0.1)
    assert left_in(store) - before <= {"cache"}


async def test_what_it_says_can_be_done_while_it_is_kept(tmp_path: Path) -> None:
    process = await start(*DEMO, env=environment(tmp_path, KEEP="1"))
    curl = await line_with(process.stdout, "curl ")
    while curl.rstrip().endswith("\\"):
        curl = curl.rstrip()[:-1] + await line_with(process.stdout, "")
    python = await line_with(process.stdout, "client = OpenAI")
    export = await line_with(process.stdout, "export MESHNET_TRACKER")
    await line_with(process.stdout, "Ctrl-C stops everything.")

    done = await asyncio.to_thread(
        subprocess.run, shlex.split(curl), capture_output=True, check=True, timeout=60, text=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    (arguments,) = re.findall(r'base_url="(.*?)", api_key="(.*?)"', python)
    async with AsyncOpenAI(base_url=arguments[0], api_key=arguments[1]) as client:
        (model,) = [model.id async for model in client.models.list()]
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
    assert answer.choices[0].message.content
    told = await run("status", env=environment(tmp_path, **dict(re.findall(r"(MESHNET_\w+)=(\S+)", export))))
    assert (told.code, told.err) == (0, "")
    assert {"0:4", "4:8"} <= set(told.out.split())

    process.send_signal(signal.SIGINT)
    ran = await finish(process)
    assert (ran.code, ran.err) == (0, "")
    await none_left(tmp_path)
    assert not demos_in(tmp_path)


@pytest.mark.parametrize("moment", ["starting tracker", "starting node 2", "is served by"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_nothing_outlives_a_demo_that_is_stopped(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    process = await start(*DEMO, env=environment(tmp_path))
    await line_with(process.stdout, moment)
    assert processes_of(tmp_path)
    process.send_signal(number)
    ran = await finish(process)
    assert ran.code == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    await none_left(tmp_path)
    if number == signal.SIGTERM:
        assert not demos_in(tmp_path)


async def test_a_worker_that_cannot_start_is_explained(tmp_path: Path) -> None:
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\necho 'libgrpc++.so.1.51: cannot open shared object file' >&2\nexit 127\n")
    worker.chmod(0o755)
    ran = await run(*DEMO, env=environment(tmp_path, MESHNET_WORKER=str(worker)))
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    # Both fail, and either may be the first.
    assert re.match(r"meshnet: node [12] ended with exit code 2; it said: ", line)
    assert "libgrpc++.so.1.51: cannot open shared object file" in line
    await none_left(tmp_path)


async def test_a_child_that_dies_while_it_is_kept_is_explained(tmp_path: Path) -> None:
    process = await start(*DEMO, "--keep", env=environment(tmp_path))
    await line_with(process.stdout, "Ctrl-C stops everything.")
    (serve,) = [pid for pid in processes_of(tmp_path) if "serve" in arguments_of(pid)]
    os.kill(serve, signal.SIGKILL)
    ran = await finish(process)
    assert ran.code == 2
    assert ran.err.startswith("meshnet: serve ended by itself")
    await none_left(tmp_path)


async def test_what_a_killed_demo_left_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in ("demo-killed", "demo-running"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "demo.lock").touch()
    running = os.open(tmp_path / "demo-running" / "demo.lock", os.O_RDONLY)
    try:
        fcntl.flock(running, fcntl.LOCK_EX)
        ran = await run(*DEMO, env=environment(tmp_path))
    finally:
        os.close(running)
    assert ran.code == 0
    assert demos_in(tmp_path) == ["demo-running"]
