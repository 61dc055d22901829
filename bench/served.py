"""The whole system on loopback: tracker, gateway, two node agents and their workers, called over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from bench.samples import Timing
from meshnet.cli import credentials
from meshnet.cli.ask import connect
from meshnet.cli.children import children
from meshnet.core import LayerRange, Telemetry
from meshnet.errors import MeshnetError

_READY_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 300.0


class ServedFailed(MeshnetError):
    """The gateway did not answer as it was asked to; the message says how."""


class Served:
    """A model behind a gateway; made by `serve`."""

    def __init__(self, url: str, api_key: str, model: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._model = model

    async def decode(self, prompt: Sequence[int], new_tokens: int) -> Timing:
        """Time the tokens after the first: by the head's clock, and from event to event as an HTTP client sees it."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        first_s = last_s = 0.0
        telemetry: Telemetry | None = None
        async with (
            httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=_ANSWER_TIMEOUT_S) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            if not response.is_success:
                raise ServedFailed(f"the gateway refused: {(await response.aread()).decode(errors='replace')[:300]}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                arrived_s = time.perf_counter()
                event = json.loads(data)
                if "error" in event:
                    raise ServedFailed(f"the answer broke off: {event['error']}")
                if event.get("meshnet"):  # the last event, sent when every hop has been closed
                    telemetry = Telemetry.model_validate(event["meshnet"])
                else:
                    first_s = first_s or arrived_s
                    last_s = arrived_s
        if telemetry is None or telemetry.decode_tokens_per_s is None or telemetry.generated_tokens != new_tokens:
            raise ServedFailed(f"{new_tokens} tokens were asked for; the telemetry says {telemetry}")
        decoded = new_tokens - 1
        return Timing(decoded, 1e6 * decoded / telemetry.decode_tokens_per_s, 1e6 * (last_s - first_s))


@asynccontextmanager
async def serve(
    directory: Path, model: Path, ranges: Sequence[LayerRange], *, threads: int, context_tokens: int
) -> AsyncIterator[Served]:
    """``meshnet serve`` and one ``meshnet node`` per range; logs and state go to ``directory``."""
    api_key, join_token = credentials.new_api_key(), credentials.new_join_token()
    environment = {credentials.API_KEY_ENVIRONMENT: api_key, credentials.JOIN_TOKEN_ENVIRONMENT: join_token}
    async with children(directory) as started:
        state = directory / "tracker"
        gateway = await started.start(
            "serve", ["serve", "--port", "0", "--json", "--state-dir", str(state)], environment
        )
        url = str((await gateway.event(_READY_TIMEOUT_S))["url"])
        for number, layers in enumerate(ranges, start=1):
            options = ["--model", str(model), "--layers", str(layers), "--tracker", url, "--json"]
            options += ["--threads", str(threads), "--context", str(context_tokens), "--sessions", "1"]
            options += ["--state-dir", str(directory / f"node-{number}")]
            node = await started.start(f"node {number}", ["node", *options], environment)
            await node.event(_READY_TIMEOUT_S)
        async with connect(url, api_key) as client:
            yield Served(url, api_key, await _first_model(client.models))


async def _first_model(models: Callable[[], Awaitable[Sequence[str]]]) -> str:
    async with asyncio.timeout(_READY_TIMEOUT_S):
        while True:
            names = await models()
            if names:
                return names[0]
            await asyncio.sleep(0.1)
