"""10,000 random and mutated request bodies (seeded) to a gateway before a real worker: every answer is a documented
one, nothing crashes, and no session is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from tests.integration.gateway_fixtures import MODEL, Mesh, mesh

BODIES = 10_000
SEED = 20_261_129
CONNECTIONS = 12

#: With its one worker alive and slots for every connection, the gateway has no reason for any other status.
DOCUMENTED = {200, 400, 404, 413}

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["\n", "END"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"65": 1.5},
    "presence_penalty": 0.1,
    "user": "someone",
}
COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": "once upon a time",
    "max_tokens": 3,
    "logprobs": 2,
    "top_k": 40,
    "min_p": 0.05,
    "typical_p": 0.9,
    "repeat_penalty": 1.1,
    "ignore_eos": True,
    "frequency_penalty": -0.5,
}
FIELDS = [*CHAT, *COMPLETION, "n", "stream", "stream_options", "tools", "response_format", "max_completion_tokens", "x"]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 255, 2**31, 2**32, 2**63, -(2**63), 2**70, 0.0, -0.5, 1e-300, 1e300, 0.5,
    "", "a", "tiny", MODEL, "\u0000", "\u20ac\U0001f600", "x" * 300, "<bos><eos>", "{{ 7 * 7 }}", "../../etc/passwd",
    [], [[]], [1, 2, 3], [257, 256], [-1], [1e9], ["a"], ["a", "b"], [None], [{}], [[1, 2]], [True],
    {}, {"a": 1}, {"65": -100}, {"257": 100}, {"258": 1}, {"-1": 1}, {"1e3": 2}, {"include_usage": True},
    {"type": "text"}, {"type": "json_object"}, [{"role": "user", "content": "hi"}], [{"role": "user"}],
    [{"role": "assistant", "content": None}], [{"role": "tool", "content": "x"}], [{"role": 5, "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], [{"role": "user", "content": [{"type": "audio"}]}],
]  # fmt: skip


def bodies(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Pairs of path and body."""
    for _ in range(BODIES):
        path, base = rng.choice((("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)))
        fields = json.loads(json.dumps(base))
        fields["stream"] = rng.random() < 0.5
        kind = rng.random()
        if kind < 0.1:
            yield path, rng.randbytes(rng.randrange(200))
        elif kind < 0.2:
            yield path, json.dumps(random_json(rng, 4)).encode()
        elif kind < 0.45:
            yield path, flipped(rng, json.dumps(fields).encode())
        else:
            for _ in range(rng.choice((0, 1, 1, 2, 4))):
                mutate(rng, fields)
            yield path, json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode()


def mutate(rng: random.Random, fields: dict[str, Any]) -> None:
    name = rng.choice(FIELDS)
    if rng.random() < 0.2:
        fields.pop(name, None)
    else:
        fields[name] = rng.choice(VALUES)


def flipped(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed))
        action = rng.randrange(3)
        if action == 0:
            changed[at] = rng.randrange(256)
        elif action == 1:
            del changed[at : at + rng.randrange(1, 10)]
        else:
            changed[at:at] = rng.randbytes(3)
        if not changed:
            break
    return bytes(changed)


def random_json(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(VALUES)
    if rng.random() < 0.5:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(FIELDS): random_json(rng, depth - 1) for _ in range(rng.randrange(6))}


async def send(mesh: Mesh, path: str, body: bytes, *, leave: bool) -> int | None:
    """Status of the answer after checking its shape; ``None`` if this client left before it came."""
    if leave:
        request = asyncio.ensure_future(mesh.http.post(path, content=body))
        await asyncio.wait([request], timeout=0.002)
        if not request.done():
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            return None
        response = request.result()
    else:
        response = await mesh.http.post(path, content=body)
    assert response.status_code in DOCUMENTED, (response.status_code, response.text, path, body)
    if response.status_code != 200:
        check_error(response, body)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), (response.text, body)
    else:
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length"), (response.text, body)
    return response.status_code


def check_error(response: httpx.Response, body: bytes) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, (error, body)
    assert error["message"], body
    assert error["type"] == "invalid_request_error", (error, body)


async def test_bodies_that_make_no_sense() -> None:
    rng = random.Random(SEED)
    wanted = bodies(rng)
    seen: Counter[int | None] = Counter()

    async def talk(running: Mesh) -> None:
        for path, body in wanted:
            seen[await send(running, path, body, leave=rng.random() < 0.05)] += 1

    async with mesh("0:4", "4:8", sessions=2 * CONNECTIONS, context_tokens=128) as running:
        await asyncio.gather(*(talk(running) for _ in range(CONNECTIONS)))
        assert seen.total() == BODIES
        # The fuzz reached generation as well as every kind of refusal.
        assert seen[200] > BODIES / 20
        assert seen[400] > BODIES / 4
        assert seen[404] > 0
        await running.idle(timeout_s=5)
        assert running.routes.open_sessions == set()
        answer = await running.chat(max_tokens=3)
        assert answer.status_code == 200
