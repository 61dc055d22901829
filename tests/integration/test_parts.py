"""Workers whose ranges overlap: a session uses a part of one of them, and gets the same answer in the last bit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions
from meshnet.errors import HopRefused
from tests.support.mesh import API_KEY, MODEL, mesh
from tests.support.served_route import Answer, ServedRoute, serve
from tests.support.tiny_models import tiny_model

PROMPT = tuple(range(1000, 1200))
NEW_TOKENS = 24


def _options(model: Path | str, ranges: Iterable[str]) -> list[WorkerOptions]:
    return [
        WorkerOptions(
            model=str(model),
            layers=None if layers == "all" else LayerRange.parse(layers),
            threads=1,
            context_tokens=512,
            sessions=2,
        )
        for layers in ranges
    ]


async def _answer_with(route: ServedRoute, *parts: str) -> Answer:
    route.shards = [
        worker.shard.part(LayerRange.parse(layers)) for worker, layers in zip(route.workers, parts, strict=True)
    ]
    await route.wait_for_parts()
    return await route.answer(PROMPT, NEW_TOKENS, chunk_tokens=64)


def _anonymous_bytes(pid: int | None) -> int:
    """Memory of a process that is no file's."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say")


async def test_overlapping_shards_of_smollm2_answer_as_meeting_ones() -> None:
    model = fetch_sample("smollm2-135m-instruct")
    async with serve(_options(model, ("0:15", "15:30")), name="smollm2", artifact_digest="sha256:aa") as route:
        expected = await route.answer(PROMPT, NEW_TOKENS, chunk_tokens=64)
    async with serve(_options(model, ("0:20", "10:30")), name="smollm2", artifact_digest="sha256:aa") as route:
        tail = route.workers[1]
        before = _anonymous_bytes(tail.pid)
        started_s = time.monotonic()
        assert await _answer_with(route, "0:20", "20:30") == expected
        first_s = time.monotonic() - started_s
        extra = _anonymous_bytes(tail.pid) - before
        started_s = time.monotonic()
        assert await _answer_with(route, "0:20", "20:30") == expected
        print(
            f"first answer {first_s:.2f} s, next {time.monotonic() - started_s:.2f} s; the part took "
            f"{extra / 1e6:.1f} MB: cache of the whole {tail.shard.kv_bytes / 1e6:.1f} MB, "
            f"compute {tail.shard.compute_bytes / 1e6:.1f} MB, weights {tail.shard.weight_bytes / 1e6:.1f} MB"
        )
        # Half of the layers: half the cache, step buffers, and no second copy of the weights.
        assert extra < tail.shard.kv_bytes / 2 + 1.5 * tail.shard.compute_bytes + 20_000_000
        assert await _answer_with(route, "0:10", "10:30") == expected
        assert await _answer_with(route, "0:15", "15:30") == expected


@pytest.mark.parametrize("architecture", ["deepseek4", "glm-dsa"])
async def test_parts_of_models_with_other_states(architecture: str) -> None:
    model = tiny_model(architecture)
    async with serve(_options(model, ("all",)), name="tiny", artifact_digest="sha256:aa") as route:
        expected = await route.answer(PROMPT, NEW_TOKENS, chunk_tokens=64)
        n_layer = route.shards[0].n_layer
    async with serve(_options(model, ("0:6", f"2:{n_layer}")), name="tiny", artifact_digest="sha256:aa") as route:
        assert await _answer_with(route, "0:6", f"6:{n_layer}") == expected
        assert await _answer_with(route, "0:2", f"2:{n_layer}") == expected


async def test_an_illegal_part_is_refused_with_the_reason() -> None:
    """Layers 3 to 5 of this model use the choice of rows that layer 2 made."""
    model = tiny_model("glm-dsa")
    async with serve(_options(model, ("0:10",)), name="tiny", artifact_digest="sha256:aa") as route:
        (shard,) = route.shards
        assert [cut.layer for cut in shard.cuts] == [1, 2, 6]
        for layers in ("0:4", "4:6"):
            route.shards = [shard.model_copy(update={"layers": LayerRange.parse(layers)})]
            with pytest.raises(HopRefused) as caught:
                await route.answer(PROMPT, NEW_TOKENS)
            assert caught.value.refusal == "REFUSAL_WRONG_LAYERS"
            assert "it cannot be cut before layer 4 (" in str(caught.value)
            assert "needs 'cache_k_l" in str(caught.value)


async def _chat_over(directory: Path, *ranges: str) -> Any:
    """The answer of a mesh whose nodes hold ``ranges``; the tracker chooses who serves what."""
    async with mesh(directory) as running:
        await running.serve()
        for layers in ranges:
            await running.node(layers, "--threads", "1")
        async with httpx.AsyncClient(base_url=running.url, headers={"authorization": f"Bearer {API_KEY}"}) as http:
            response = await http.post(
                "/v1/chat/completions",
                json={
                    "model": MODEL,
                    "messages": [{"role": "user", "content": "who serves what?"}],
                    "max_tokens": 40,
                    "temperature": 0.8,
                    "seed": 3,
                },
                timeout=60,
            )
        assert response.status_code == 200, response.text
        return response.json()


async def test_a_chat_over_overlapping_nodes_is_the_one_over_meeting_nodes(tmp_path: Path) -> None:
    meeting, overlapping = (tmp_path / "meeting", tmp_path / "overlapping")
    for directory in (meeting, overlapping):
        directory.mkdir()
    expected = await _chat_over(meeting, "0:4", "4:8")
    found = await _chat_over(overlapping, "0:6", "3:8")
    assert found["choices"] == expected["choices"]
    # They meet somewhere in what both of them hold, so that at least one serves a part.
    head, tail = (LayerRange.parse(hop["layers"]) for hop in found["meshnet"]["hops"])
    assert (head.start, tail.end) == (0, 8)
    assert 3 <= head.end == tail.start <= 6
