"""From a validated request to the JSON of its answer, whole or in chunks."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal, TypedDict, Unpack

from meshnet.core import Telemetry
from meshnet.errors import MeshnetError
from meshnet.gateway.failures import AnswerFailed, failure_of
from meshnet.gateway.generation import Generation, GenerationRequest
from meshnet.gateway.generations import Generations
from meshnet.gateway.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from meshnet.gateway.responses import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionChoice,
    FinishReason,
    Usage,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
)
from meshnet.gateway.schemas import ChatRequest, CompletionRequest, GenerationParameters
from meshnet.gateway.text import AnswerText, Delta, PlacedToken
from meshnet.rpc.generated import shard_pb2 as pb

Choice = ChatChoice | ChatChunkChoice | CompletionChoice

# The whole context: OpenAI's penalties look at everything said so far.
_PENALTY_WHOLE_CONTEXT = -1

# 0 turns top_p and typical_p off on the wire, also what rounds to 0 there. A client that sends so little asks for the
# most likely token only.
_MIN_PROBABILITY = 1e-9


async def complete(generations: Generations, request: ChatRequest | CompletionRequest) -> Answer:
    """The whole answer in one body.

    Raises:
        MeshnetError: as ``Generations.start``; ``AnswerFailed`` if the answer broke off.
    """
    shape = _shape_of(request)
    texts: list[str] = []
    tokens: list[PlacedToken] = []
    run = _Run(generations, request)
    async for delta in run.deltas():
        texts.append(delta.text)
        tokens += delta.tokens
    choice = shape.whole("".join(texts), tokens, run.finish_reason)
    return shape.answer(choice, whole=True, usage=run.usage, meshnet=run.telemetry)


async def stream(generations: Generations, request: ChatRequest | CompletionRequest) -> AsyncGenerator[bytes, None]:
    """The answer in chunks (JSON): text as it comes, a chunk with the finish reason and telemetry, then the usage.

    Raises:
        MeshnetError: as ``complete``, at any chunk.
    """
    shape = _shape_of(request)
    # OpenAI: chunks before the one with the usage have a null one.
    no_usage: _NoUsage = {"usage": None} if request.include_usage else {}
    run = _Run(generations, request)
    deltas = run.deltas()
    opening = shape.opening()
    async with aclosing(deltas):
        async for delta in deltas:
            if opening is not None:
                yield shape.answer(opening, **no_usage).to_json()
                opening = None
            yield shape.answer(shape.part(delta), **no_usage).to_json()
    if opening is not None:
        yield shape.answer(opening, **no_usage).to_json()
    yield shape.answer(shape.last(run.finish_reason), meshnet=run.telemetry, **no_usage).to_json()
    if request.include_usage:
        yield shape.answer(None, usage=run.usage).to_json()


class _Run:
    """One generation and its text. ``telemetry``, ``usage`` and ``finish_reason`` are there after the last delta."""

    def __init__(self, generations: Generations, request: ChatRequest | CompletionRequest) -> None:
        self._generations = generations
        self._request = request
        self.telemetry: Telemetry | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Non-empty deltas; ends after every hop was told that the session is over."""
        request = self._request
        text = AnswerText(request.stop)
        generation: Generation | None = None
        try:
            async with self._generations.start(_generation_request(request)) as generation:
                while not text.stopped and (token := await generation.next_token()) is not None:
                    if token.is_eog and not request.ignore_eos:
                        continue
                    if delta := text.push(token):
                        yield delta
                if not text.stopped and (delta := text.finish()):
                    yield delta
                if text.stopped:
                    generation.stop()
        except MeshnetError as error:
            if generation is None:
                raise
            raise AnswerFailed(dataclasses.replace(failure_of(error), telemetry=generation.telemetry)) from error
        self.telemetry = generation.telemetry

    @property
    def _ended(self) -> Telemetry:
        if self.telemetry is None:
            raise RuntimeError("the answer has not ended")
        return self.telemetry

    @property
    def finish_reason(self) -> FinishReason:
        return finish_reason(self._ended.finish_cause)

    @property
    def usage(self) -> Usage:
        prompt, answer = self._ended.prompt_tokens, self._ended.generated_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)


class _Rest(TypedDict, total=False):
    """Parts of an answer that are sent only if they are given."""

    usage: Usage | None
    meshnet: Telemetry | None


class _NoUsage(TypedDict, total=False):
    usage: None


class _Shape:
    """How one route dresses an answer."""

    id_prefix: str
    whole_object: Literal["chat.completion", "text_completion"]
    part_object: Literal["chat.completion.chunk", "text_completion"]

    def __init__(self, request: GenerationParameters) -> None:
        self._model = request.model
        self._with_logprobs = request.top_tokens is not None
        self._id = self.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())

    def whole(self, text: str, tokens: Sequence[PlacedToken], reason: FinishReason) -> Choice:
        raise NotImplementedError

    def opening(self) -> Choice | None:
        """A chunk before the first text, if the route has one."""
        raise NotImplementedError

    def part(self, delta: Delta) -> Choice:
        raise NotImplementedError

    def last(self, reason: FinishReason) -> Choice:
        raise NotImplementedError

    def answer(self, choice: Choice | None, *, whole: bool = False, **rest: Unpack[_Rest]) -> Answer:
        return Answer(
            id=self._id,
            object=self.whole_object if whole else self.part_object,
            created=self._created,
            model=self._model,
            choices=[] if choice is None else [choice],
            **rest,
        )


class _ChatShape(_Shape):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    part_object = "chat.completion.chunk"

    def whole(self, text: str, tokens: Sequence[PlacedToken], reason: FinishReason) -> Choice:
        message = ChatMessage(role="assistant", content=text, refusal=None)
        logprobs = chat_logprobs(tokens) if self._with_logprobs else None
        return ChatChoice(index=0, message=message, logprobs=logprobs, finish_reason=reason)

    def opening(self) -> Choice | None:
        delta = ChatDelta(role="assistant", content="")
        return ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=None)

    def part(self, delta: Delta) -> Choice:
        logprobs = chat_logprobs(delta.tokens) if self._with_logprobs and delta.tokens else None
        return ChatChunkChoice(index=0, delta=ChatDelta(content=delta.text), logprobs=logprobs, finish_reason=None)

    def last(self, reason: FinishReason) -> Choice:
        return ChatChunkChoice(index=0, delta=ChatDelta(), logprobs=None, finish_reason=reason)


class _CompletionShape(_Shape):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    part_object = "text_completion"

    def whole(self, text: str, tokens: Sequence[PlacedToken], reason: FinishReason) -> Choice:
        logprobs = completion_logprobs(tokens) if self._with_logprobs else None
        return CompletionChoice(index=0, text=text, logprobs=logprobs, finish_reason=reason)

    def opening(self) -> Choice | None:
        return None

    def part(self, delta: Delta) -> Choice:
        logprobs = completion_logprobs(delta.tokens) if self._with_logprobs and delta.tokens else None
        return CompletionChoice(index=0, text=delta.text, logprobs=logprobs, finish_reason=None)

    def last(self, reason: FinishReason) -> Choice:
        return CompletionChoice(index=0, text="", logprobs=None, finish_reason=reason)


def _shape_of(request: ChatRequest | CompletionRequest) -> _Shape:
    return _ChatShape(request) if isinstance(request, ChatRequest) else _CompletionShape(request)


def _generation_request(request: ChatRequest | CompletionRequest) -> GenerationRequest:
    return GenerationRequest(
        model=request.model,
        prompt=_prompt(request),
        sampling=sampling_params(request),
        answer_tokens=request.answer_tokens,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
    )


def _prompt(request: ChatRequest | CompletionRequest) -> Prompt:
    if isinstance(request, ChatRequest):
        return ChatPrompt([message.model_dump(exclude_none=True) for message in request.messages])
    if isinstance(request.prompt, str):
        return TextPrompt(request.prompt)
    return TokenPrompt(request.prompt)


def sampling_params(request: GenerationParameters) -> pb.SamplingParams:
    penalties = request.presence_penalty or request.frequency_penalty or request.repeat_penalty != 1
    return pb.SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=max(request.top_p, _MIN_PROBABILITY),
        min_p=request.min_p,
        typical_p=max(request.typical_p, _MIN_PROBABILITY),
        penalty_last_n=_PENALTY_WHOLE_CONTEXT if penalties else 0,
        repeat_penalty=request.repeat_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias,
        logprobs=0 if request.top_tokens is None else 1 + request.top_tokens,
    )
