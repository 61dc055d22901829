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
from tests.support.gateway_server import TEST_SETTINGS

BODIES = 10_000
SEED = 20_261_129
CONNECTIONS = 12
#: Bodies about as large as the limit are few: each of them is sent and read.
LARGE = 12
BODY_LIMIT = TEST_SETTINGS.max_body_bytes

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
    large = set(rng.sample(range(BODIES), LARGE))
    for number in range(BODIES):
        path, base = rng.choice((("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)))
        fields = json.loads(json.dumps(base))
        fields["stream"] = rng.random() < 0.5
        kind = rng.random()
        if number in large:
            # One that just fits is no error.
            size = BODY_LIMIT + rng.choice((0, 1, 100_000))
            fields["user"] = ""
            fields["user"] = "x" * (size - len(json.dumps(fields)))
            yield path, json.dumps(fields).encode()
        elif kind < 0.1:
            yield path, rng.randbytes(rng.randrange(200))
        elif kind < 0.2:
            yield path, json.dumps(random_json(rng, 4)).encode()
        elif kind < 0.4:
            yield path, flipped(rng, json.dumps(fields).encode())
        elif kind < 0.6:
            yield path, odd(rng, fields)
        else:
            for _ in range(rng.choice((0, 1, 1, 2, 4))):
                mutate(rng, fields)
            yield path, json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode()


def odd(rng: random.Random, fields: dict[str, Any]) -> bytes:
    """``fields`` with JSON text in one or two places that ``json.dumps`` does not write, or is not known for."""
    members = [(name, json.dumps(value)) for name, value in fields.items()]
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice((*fields, rng.choice(FIELDS)))
        text = odd_text(rng)
        if name in ("messages", "prompt") and rng.random() < 0.7:
            # Where a string belongs, it is mostly one level further down.
            text = f'[{{"role": "user", "content": {text}}}]' if name == "messages" else f"[{text}]"
        if rng.random() < 0.3:
            members.insert(rng.randrange(len(members) + 1), (name, text))  # mostly a duplicate
        else:
            members = [(other, text if other == name else value) for other, value in members]
    return ("{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in members) + "}").encode()


def odd_text(rng: random.Random) -> str:
    """JSON, or nearly."""
    kind = rng.randrange(5)
    if kind == 0:
        half = rng.choice((r"\ud800", r"\udfff", r"\udc00\ud800", r"\uD83D", r"\ud800\u0041"))
        before, after = rng.choice(("", "a", r"\u20ac")), rng.choice(("", "b"))
        return f'"{before}{half}{after}"'
    if kind == 1:
        depth = rng.choice((100, 190, 250, 1_000, 5_000, 20_000))
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"type":"text","text":', "}]")))
        return opening * depth + "0" + closing * rng.choice((depth, depth, 0))
    if kind == 2:
        digits = "".join(rng.choices("123456789", k=rng.choice((40, 400, 4_000, 5_000))))
        return rng.choice(("", "-")) + digits + rng.choice(("", "", ".5", "e9", "e999"))
    if kind == 3:
        return rng.choice(
            ("NaN", "Infinity", "-Infinity", "nan", "inf", "1e999", "-1e999", "0x10", "-0", "1_000", "01")
        )
    # Duplicate keys inside an object.
    return rng.choice(
        ('{"65": 1, "65": 2}', '{"65": 1, "65": null}', '{"type": "text", "type": "audio", "type": "text"}')
    )


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
    assert response.status_code in DOCUMENTED, (response.status_code, response.text, path, body[:2_000])
    assert (response.status_code == 413) == (len(body) > BODY_LIMIT), (response.status_code, len(body))
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
    assert isinstance(error["message"], str), (error, body)
    assert error["message"], body
    assert error["param"] is None or isinstance(error["param"], str), (error, body)
    assert isinstance(error["code"], str), (error, body)
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
        assert seen[413] > 0
        await running.idle(timeout_s=5)
        assert running.routes.open_sessions == set()
        answer = await running.chat(max_tokens=3)
        assert answer.status_code == 200
