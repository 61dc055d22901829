"""A client of the gateway's API, as anybody could write one: plain HTTP and server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError

from meshnet.core import Telemetry
from meshnet.errors import MeshnetError, UsageError
from meshnet.tracker.client import base_url

CONNECT_TIMEOUT_S = 5.0
#: The gateway sends a comment at least every 10 s while it works.
SILENCE_TIMEOUT_S = 60.0


class AnswerError(MeshnetError):
    """The gateway refused, or broke off; the message is its own."""


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    text: str
    telemetry: Telemetry | None


class Gateway:
    """A gateway at ``url``; made by `connect`."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    async def models(self) -> list[str]:
        """Names of the models that are served now.

        Raises:
            AnswerError: no answer, or a refusal.
        """
        try:
            response = await self._http.get("/v1/models")
            _raise_for_refusal(response)
            return [str(model["id"]) for model in response.json()["data"]]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise AnswerError(f"{self._url} did not answer as a Meshnet gateway does") from error

    async def chat(
        self,
        model: str,
        messages: Sequence[dict[str, str]],
        *,
        on_text: Callable[[str], None],
        options: dict[str, Any] | None = None,
    ) -> Answer:
        """Ask, and call ``on_text`` with each piece of the answer as it comes.

        Raises:
            AnswerError: no answer, a refusal, or an answer that broke off.
        """
        request = {**(options or {}), "model": model, "messages": list(messages), "stream": True}
        said: list[str] = []
        telemetry: Telemetry | None = None
        finished = False
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=request) as response:
                if not response.is_success:
                    await response.aread()
                _raise_for_refusal(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        finished = True
                        break
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise AnswerError(f"the answer broke off: {chunk['error'].get('message')}")
                    for choice in chunk.get("choices", []):
                        text = choice.get("delta", {}).get("content") or ""
                        if text:
                            said.append(text)
                            on_text(text)
                    if chunk.get("meshnet"):
                        telemetry = Telemetry.model_validate(chunk["meshnet"])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise AnswerError(f"{self._url} sent an event that is not of a chat answer: {error}") from error
        if not finished:
            raise AnswerError("the answer broke off without an end")
        return Answer("".join(said), telemetry)

    def _unreachable(self, error: httpx.HTTPError) -> AnswerError:
        return AnswerError(
            f"no answer from {self._url} ({str(error) or type(error).__name__}); is `meshnet serve` running there?"
        )


@asynccontextmanager
async def connect(url: str, api_key: str) -> AsyncIterator[Gateway]:
    """A client of the gateway at ``url``.

    Raises:
        UsageError: ``url`` is not an http(s) URL.
    """
    async with httpx.AsyncClient(
        base_url=base_url(url.rstrip("/").removesuffix("/v1")),
        headers={"authorization": f"Bearer {api_key}"},
        timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    ) as http:
        yield Gateway(http, url)


def choose_model(models: Sequence[str], wanted: str | None) -> str:
    """``wanted``, or the only model there is.

    Raises:
        UsageError: none is served, or it is not clear which one is meant.
    """
    if wanted is not None:
        return wanted
    if not models:
        raise UsageError("no model is served now; see `meshnet status` for what is missing")
    if len(models) > 1:
        raise UsageError(f"several models are served; choose one with -m: {', '.join(models)}")
    return models[0]


def _raise_for_refusal(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"it answered {response.status_code}"
    raise AnswerError(f"the gateway refused: {message}")
