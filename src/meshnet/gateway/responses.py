"""Answers of the OpenAI-compatible API. A field that was set to ``None`` is sent as null; an unset one is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from meshnet.core import FinishCause, Telemetry
from meshnet.gateway.text import PlacedToken

#: What an impossible token (log-probability of minus infinity) reports: JSON has no infinity.
MIN_LOGPROB = -9999.0

FinishReason = Literal["stop", "length"]

_FINISH_REASONS: dict[FinishCause, FinishReason] = {
    FinishCause.EOG: "stop",
    FinishCause.STOP: "stop",
    FinishCause.LENGTH: "length",
    FinishCause.CAPACITY: "length",
}


def finish_reason(cause: FinishCause) -> FinishReason:
    """OpenAI's name for a regular end.

    Raises:
        KeyError: ``cause`` is no regular end; a failure must never look like one.
    """
    return _FINISH_REASONS[cause]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Answer(BaseModel):
    """Body of an answer, or one chunk of a streamed one. ``usage`` and ``meshnet`` are left out where unset."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[ChatChoice | ChatChunkChoice | CompletionChoice]
    usage: Usage | None = None
    meshnet: Telemetry | None = None

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meshnet: dict[str, Any]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


def chat_logprobs(tokens: Sequence[PlacedToken]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=_text(placed.token.piece),
                logprob=_finite(placed.token.logprob),
                bytes=list(placed.token.piece),
                top_logprobs=[
                    TopLogprob(token=_text(top.piece), logprob=_finite(top.logprob), bytes=list(top.piece))
                    for top in placed.token.top
                ],
            )
            for placed in tokens
        ],
        refusal=None,
    )


def completion_logprobs(tokens: Sequence[PlacedToken]) -> CompletionLogprobs:
    top_logprobs = []
    for placed in tokens:
        top: dict[str, float] = {}
        for alternative in placed.token.top:
            # Different tokens can have the same text; the more likely one comes first.
            top.setdefault(_text(alternative.piece), _finite(alternative.logprob))
        top_logprobs.append(top)
    return CompletionLogprobs(
        tokens=[_text(placed.token.piece) for placed in tokens],
        token_logprobs=[_finite(placed.token.logprob) for placed in tokens],
        top_logprobs=top_logprobs,
        text_offset=[placed.offset for placed in tokens],
    )


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
