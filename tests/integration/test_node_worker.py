"""Starting worker processes that misbehave: programs written here, run for real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshnet.artifact.identity import FileStamps
from meshnet.core import LayerRange
from meshnet.engines.native import KEY_ENVIRONMENT, WorkerOptions
from meshnet.errors import ArtifactError, WorkerError
from meshnet.node.address import Endpoint
from meshnet.node.model import LocalModel
from meshnet.node.settings import NodeSettings
from meshnet.node.shard import ShardKeeper
from meshnet.node.worker import Worker, WorkerPlan
from meshnet.rpc.client import WorkerPool

SHARD_ID = "n1/0-8.ab"
DESCRIPTION: dict[str, Any] = {
    "shardId": SHARD_ID,
    "artifactDigest": "sha256:aa",
    "architecture": "test",
    "nLayer": 8,
    "nCtxTrain": 1024,
    "layers": {"end": 8},
    "boundaryIn": {"digest": "empty"},
    "boundaryOut": {"digest": "empty"},
    "sessionCapacityTokens": 512,
    "sessionSlots": 4,
    "maxStepTokens": 64,
    "compatibilityId": "b1",
    "buildId": "b1 g++",
    "engine": "test",
}


def plan(tmp_path: Path, script: str) -> WorkerPlan:
    binary = tmp_path / "worker"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    return WorkerPlan(
        binary=binary,
        options=WorkerOptions(model="m.gguf", layers=LayerRange(start=0, end=8)),
        model_name="m",
        artifact_digest="sha256:aa",
        endpoint=Endpoint("127.0.0.1:0", "192.0.2.7"),
    )


def ready(address: object = "127.0.0.1:4711", **changes: object) -> str:
    event = {"event": "ready", "address": address, "description": {**DESCRIPTION, **changes}}
    return f"echo '{json.dumps(event)}'"


async def start(tmp_path: Path, script: str, timeout_s: float = 20) -> Worker:
    return await Worker.start(plan(tmp_path, script), SHARD_ID, timeout_s=timeout_s)


async def test_a_ready_worker_is_told_under_its_advertised_address(tmp_path: Path) -> None:
    worker = await start(tmp_path, f"echo loading; {ready(later='field')}; exec cat")
    assert worker.shard.address == "192.0.2.7:4711"
    assert worker.address == "127.0.0.1:4711"
    assert (worker.shard.model, str(worker.shard.layers)) == ("m", "0:8")
    await worker.stop(drain_timeout_s=10)
    assert await worker.wait() == "killed by SIGTERM"


async def test_every_start_has_its_own_key_and_no_secret_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHNET_API_KEY", "an-api-key")
    monkeypatch.setenv("MESHNET_JOIN_TOKEN", "a-join-token")
    keys = set()
    for number in range(2):
        worker = await start(tmp_path, f"env > {tmp_path}/env{number}; {ready()}; exec cat")
        await worker.kill()
        seen = dict(line.partition("=")[::2] for line in (tmp_path / f"env{number}").read_text().splitlines())
        assert seen[KEY_ENVIRONMENT] == worker.worker_key
        assert "MESHNET_API_KEY" not in seen
        assert "MESHNET_JOIN_TOKEN" not in seen
        keys.add(worker.worker_key)
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            """echo '{"event": "failed", "code": "illegal_cut", "message": "layer 3 needs v_first"}'; exit 3""",
            r"the worker cannot load m\.gguf \(illegal_cut\): layer 3 needs v_first",
        ),
        (
            "echo 'unknown flag --layers' >&2; exit 2",
            r"died before it was ready \(exit code 2\); it said: unknown flag",
        ),
        ("echo oops >&2; kill -SEGV $$", r"died before it was ready \(killed by SIGSEGV\); it said: oops"),
        ("exit 0", r"died before it was ready \(exit code 0\)"),
        ("""echo '{"event": "ready"}'; exec cat""", "ready line is malformed"),
        ("""echo '{"event": "ready", "address": "x:1", "description": 7}'; exec cat""", "ready line is malformed"),
        (f"{ready(nLayer='many')}; exec cat", "ready line is malformed"),
        (f"{ready(nLayer=4)}; exec cat", "end after the model's last layer"),
        (f"{ready(address='nowhere')}; exec cat", "malformed: the worker's address"),
        (f"{ready(shardId='other')}; exec cat", "calls itself other"),
        ("head -c 9000000 /dev/zero; exec cat", "longer than"),
    ],
)
async def test_a_worker_that_does_not_get_ready(tmp_path: Path, script: str, told: str) -> None:
    with pytest.raises(WorkerError, match=told):
        await start(tmp_path, script)


async def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    missing = plan(tmp_path, "")
    missing.binary.unlink()
    with pytest.raises(WorkerError, match=r"cannot start .*worker: No such file"):
        await Worker.start(missing, SHARD_ID, timeout_s=1)


async def test_a_worker_that_is_never_ready_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(WorkerError, match=r"not ready within 1 s; it said: waiting for a disk"):
        await start(tmp_path, f"echo $$ > {pid_file}; echo waiting for a disk >&2; exec cat", timeout_s=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


async def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    starting = asyncio.create_task(start(tmp_path, f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec cat"))
    async with asyncio.timeout(20):
        while not pid_file.exists():  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


async def test_a_worker_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    worker = await start(tmp_path, f"trap '' TERM; {ready()}; while :; do sleep 0.05; done")
    await worker.stop(drain_timeout_s=0.3)
    assert await worker.wait() == "killed by SIGKILL"


async def test_a_death_is_told_with_its_last_words(tmp_path: Path) -> None:
    worker = await start(tmp_path, f"{ready()}; read line; for n in $(seq 50); do echo line $n >&2; done; exit 7")
    stdin = worker._process.stdin
    assert stdin is not None
    stdin.close()
    assert await worker.wait() == "exit code 7"
    assert worker.told().startswith("; it said: line 31 | line 32")
    assert worker.told().endswith("| line 50")


async def test_noise_after_the_ready_line_does_not_block_the_worker(tmp_path: Path) -> None:
    noise = "head -c 300000 /dev/zero | tr '\\\\0' x"
    worker = await start(tmp_path, f"{ready()}; {noise}; {noise} >&2; echo; exit 0")
    async with asyncio.timeout(20):
        assert await worker.wait() == "exit code 0"


async def test_signals_to_a_dead_worker_do_nothing(tmp_path: Path) -> None:
    worker = await start(tmp_path, f"{ready()}; exec cat")
    os.kill(worker.pid, signal.SIGKILL)
    assert await worker.wait() == "killed by SIGKILL"
    await worker.stop(drain_timeout_s=1)
    worker.signal_kill()


async def test_ending_a_worker_that_just_ended_leaves_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Popen.send_signal polls: it would take the exit code from asyncio, which then tells a made-up one."""

    def polls(*_: object) -> None:
        raise AssertionError("this polls")

    monkeypatch.setattr(subprocess.Popen, "send_signal", polls)
    with pytest.raises(WorkerError, match="cannot load"):
        await start(tmp_path, """echo '{"event":"failed","code":"x","message":"cannot load"}'; exit 3""")


async def test_a_changed_model_file_ends_the_shard(tmp_path: Path) -> None:
    """Its digest is told to the tracker once, so a worker that maps or loads something else must not go on."""
    model = tmp_path / "m.gguf"
    model.write_text("as it was")
    # The keeper makes the shard's id up.
    line = ready().replace(SHARD_ID, "'$2'")
    script = f"while [ $1 != --shard-id ]; do shift; done; {line}; exec cat"
    serving = replace(plan(tmp_path, script), source=LocalModel(FileStamps.of([model])))
    became_ready = asyncio.Event()
    keeper = ShardKeeper("n1", serving, NodeSettings(), on_ready=lambda _: became_ready.set(), on_change=lambda: None)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20), WorkerPool() as pool:
        await asyncio.wait([running, asyncio.create_task(became_ready.wait())], return_when=asyncio.FIRST_COMPLETED)
        model.write_text("something else")
        assert await keeper.advertisement(pool) is None
        with pytest.raises(ArtifactError, match="changed or replaced"):
            await running
