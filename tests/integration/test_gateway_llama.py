"""SmolLM2 over two workers: what only a real vocabulary and a real chat template show."""

from __future__ import annotations

from typing import Any

import pytest

from meshnet.artifact.samples import fetch_sample
from tests.integration.gateway_fixtures import MODEL, mesh

LAYERS = ("0:15", "15:30")


async def ask(running: Any, question: str, **fields: Any) -> Any:
    return await running.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, **fields
    )


@pytest.fixture(scope="module")
def model() -> str:
    return str(fetch_sample("smollm2-135m-instruct"))


async def test_chat_with_smollm2(model: str) -> None:
    async with mesh(*LAYERS, model=model, engine="llama", context_tokens=512, sessions=2) as running:
        # Each smiley is several tokens of this vocabulary.
        question = "Write three emoji of smiling faces and nothing else: \U0001f600"
        whole = await ask(running, question, max_tokens=24, logprobs=True)
        text = whole.choices[0].message.content
        entries = whole.choices[0].logprobs.content
        assert any(ord(character) > 0xFFFF for character in text)
        assert "\ufffd" in {entry.token for entry in entries}
        said = b"".join(bytes(entry.bytes) for entry in entries)
        assert said.decode(errors="replace") == text
        deltas = [
            chunk.choices[0].delta.content or ""
            async for chunk in await ask(running, question, max_tokens=24, stream=True)
        ]
        assert "".join(deltas) == text
        # Only the last character may be unfinished, where the length cut it off.
        assert all("\ufffd" not in delta for delta in deltas[:-2])

        # 37 tokens with the template's own system message, and BOS (the template's first word) once.
        capital = await ask(running, "What is the capital of France?", max_tokens=1)
        assert capital.usage.prompt_tokens == 37

        # A complete answer: its end token is counted, but has no text and no log-probability.
        done = await ask(running, "Say 'na\u00efve caf\u00e9' back to me exactly.", max_tokens=200, logprobs=True)
        assert done.choices[0].finish_reason == "stop"
        assert "<|im_end|>" not in done.choices[0].message.content
        assert len(done.choices[0].logprobs.content) == done.usage.completion_tokens - 1
        telemetry = done.model_extra["meshnet"]
        assert telemetry["finish_cause"] == "eog"
        for hop in telemetry["hops"]:
            assert hop["compute_ms"] > 0
            # 576 floats for each token that crosses the seam.
            assert max(hop["bytes_in"], hop["bytes_out"]) > 576 * 4 * hop["prefill_tokens"]
