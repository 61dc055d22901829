"""How long a session may be, with real workers: refused with the numbers beyond it, and `length` at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshnet.core import MAX_SESSION_TOKENS
from tests.support.kill_mesh import MODEL, KillMesh, kill_mesh
from tests.support.tiny_models import tiny_llama

HALVES = ("0:1", "1:2")


async def complete(mesh: KillMesh, prompt_tokens: int, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and body for a prompt of so many tokens."""
    body = {"model": MODEL, "prompt": [5] * prompt_tokens, "ignore_eos": True, "temperature": 0, **fields}
    response = await mesh.http.post("/v1/completions", json=body)
    return response.status_code, response.json()


async def assert_too_long(mesh: KillMesh, limit: int, prompt_tokens: int, max_tokens: int) -> None:
    status, body = await complete(mesh, prompt_tokens, max_tokens=max_tokens)
    assert status == 400, body
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["type"] == "invalid_request_error"
    for number in (limit, prompt_tokens):
        assert str(number) in body["error"]["message"]


async def test_the_cap_holds_where_a_model_was_trained_for_more(tmp_path: Path) -> None:
    path = tiny_llama(n_layer=2, context_tokens=200_000)
    options = ("--context", str(MAX_SESSION_TOKENS), "--sessions", "1")
    async with kill_mesh(tmp_path, path, HALVES, replicas=1, node_options=options) as mesh:
        await assert_too_long(mesh, MAX_SESSION_TOKENS, MAX_SESSION_TOKENS + 1, 1)
        await assert_too_long(mesh, MAX_SESSION_TOKENS, MAX_SESSION_TOKENS, 1)
        status, body = await complete(mesh, 40, max_tokens=3)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        await mesh.whole()


async def test_the_models_own_limit_holds(tmp_path: Path) -> None:
    limit = 300
    path = tiny_llama(n_layer=2, context_tokens=limit)
    async with kill_mesh(tmp_path, path, HALVES, replicas=1, node_options=("--sessions", "2")) as mesh:
        await assert_too_long(mesh, limit, limit + 1, 1)
        await assert_too_long(mesh, limit, limit - 10, 11)
        status, body = await complete(mesh, limit - 10, max_tokens=10)
        assert (status, body["usage"]["total_tokens"]) == (200, limit)
        assert body["choices"][0]["finish_reason"] == "length"
        await mesh.whole()


@pytest.mark.parametrize("smaller", HALVES, ids=["head", "tail"])
async def test_a_session_ends_with_length_at_the_smallest_shards_limit(tmp_path: Path, smaller: str) -> None:
    limit = 256
    async with kill_mesh(
        tmp_path,
        tiny_llama(n_layer=2),
        HALVES,
        replicas=1,
        node_options=("--context", "512", "--sessions", "2"),
        range_options={smaller: ("--context", str(limit))},
    ) as mesh:
        await assert_too_long(mesh, limit, limit + 1, 1)
        await assert_too_long(mesh, limit, limit - 6, 7)
        # As many tokens as fit, since none were asked for.
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 200}], "ignore_eos": True}
        body = (await mesh.http.post("/v1/chat/completions", json=chat)).json()
        assert body["choices"][0]["finish_reason"] == "length", body
        assert body["usage"]["prompt_tokens"] >= 200
        assert body["usage"]["total_tokens"] == limit
        assert body["meshnet"]["finish_cause"] in ("length", "capacity")
        assert body["meshnet"]["generated_tokens"] == body["usage"]["completion_tokens"]
        await mesh.whole()
