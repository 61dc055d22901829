"""Spares that compute something else than the shard that they would take over from."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.faulty_link import FaultyLink
from tests.support.kill_mesh import KillMesh, Question, Replica, free_port, kill_mesh
from tests.support.mesh import until
from tests.support.tiny_models import tiny_model

LAYERS = "0:6"
QUESTION = Question(tuple(range(1000, 1040)), 300)


async def add(mesh: KillMesh, replica: Replica) -> None:
    """Start one more, and wait until sessions may use it."""
    mesh.replicas.append(replica)
    await mesh.start_replica(replica)

    async def is_ready() -> bool:
        return any(shard.ready and shard.address == replica.link.address for shard in (await mesh.shards()).values())

    await until(f"{replica} is ready", is_ready)


# A cache of another type holds other numbers; of steps of another size the sums are rounded otherwise.
@pytest.mark.parametrize(
    ("options", "goes_on"),
    [((), True), (("--kv-type-k", "q8_0"), False), (("--step-tokens", "16"), False)],
    ids=["alike", "other cache", "other steps"],
)
async def test_an_answer_goes_on_with_its_own_tokens_or_with_an_error(
    tmp_path: Path, options: tuple[str, ...], goes_on: bool
) -> None:
    serve_options = ("--repair-timeout-s", "2")
    async with kill_mesh(tmp_path, tiny_model("llama"), [LAYERS], replicas=1, serve_options=serve_options) as mesh:
        (first,) = mesh.replicas
        undisturbed = await mesh.ask(QUESTION, stream=False)
        listen = f"127.0.0.1:{free_port()}"
        broken = False

        async def replace_the_first(tokens: int) -> None:
            nonlocal broken
            if not broken and tokens >= 10:
                broken = True
                first.signal_worker(signal.SIGSTOP)
                await add(mesh, Replica(first.layers, 1, link, listen, options))
                for pid in (first.agent_pid, *first.worker_pids()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        async with FaultyLink(listen) as link:
            answer = await mesh.ask(QUESTION, on_text=replace_the_first)
        assert broken
        if goes_on:
            assert (answer.finish_reasons, answer.tokens) == (["length"], undisturbed.tokens)
        else:
            assert answer.error is not None
            assert (answer.error["code"], answer.error["hop"]["shard"]) == ("hop_lost", first.shard_id)
            assert answer.finish_reasons == []
            assert answer.tokens == undisturbed.tokens[: len(answer.tokens)]
