"""Requests of the OpenAI-compatible API: what is accepted, what is ignored, and what is refused by name.

A parameter that would change the meaning of a request and is not supported is refused, never ignored; a parameter with
a value that asks for nothing (``null``, ``n=1``, ``tools=[]``) is accepted. Types are strict: ``"0.5"`` is no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from meshnet.core import MAX_SESSION_TOKENS
from meshnet.errors import BadParameter

_Request = TypeVar("_Request", bound="GenerationParameters")

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_LOGIT_BIASES = 1024

# Sent by unmodified clients; they describe the caller or ask for nothing that changes the answer.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Parameters that are not supported, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

_UNSUPPORTED_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

_IGNORED_IN_MESSAGE = frozenset({"annotations", "refusal"})


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{message}", {"message": message})


def _content(value: Any) -> Any:
    """Text of a message: a string, or text parts (joined by line breaks)."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _refuse(f"part {index} has type {kind!r}; only parts of type 'text' are supported")
        text = part.get("text")
        if not isinstance(text, str):
            raise _refuse(f"part {index} has no 'text' string")
        texts.append(text)
    return "\n".join(texts)


def _role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise _refuse(f"messages of role {value!r} are not supported, because tools are not")
    # Templates know "system" only; "developer" is the newer name of the same thing.
    return "system" if value == "developer" else value


def _one_prompt(value: Any) -> Any:
    """A string, a list with one string, a list of token ids, or a list with one list of token ids."""
    if isinstance(value, list):
        if not value:
            raise _refuse("the prompt is an empty list; send a string or token ids")
        if isinstance(value[0], str | list):
            if len(value) > 1:
                raise _refuse(f"{len(value)} prompts were sent; one prompt per request is supported")
            value = value[0]
    if isinstance(value, list):
        if not value:
            raise _refuse("the prompt is an empty list of token ids")
        if not all(type(token) is int and 0 <= token < 2**31 for token in value):
            raise _refuse("a list prompt holds either one string or token ids (whole numbers from 0)")
        return value
    if not isinstance(value, str):
        raise _refuse("the prompt must be a string or a list of token ids")
    return value


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 for key in value):
        raise _refuse("keys must be token ids, written as decimal strings")
    return {int(key): bias for key, bias in value.items()}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class Message(_Strict):
    """One message of a chat; ``content`` is plain text by now."""

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)] = ""
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, item in value.items():
            if key in _UNSUPPORTED_IN_MESSAGE:
                if item is not None and item not in _UNSUPPORTED_IN_MESSAGE[key]:
                    raise _refuse(f"'{key}' is not supported in messages")
            elif key not in _IGNORED_IN_MESSAGE and not (item is None and key != "role"):
                kept[key] = item
        return kept


class GenerationParameters(_Strict):
    """What chat and plain completions have in common."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[Annotated[int, Field(lt=2**31)], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_logit_bias),
        Field(max_length=MAX_LOGIT_BIASES),
    ] = {}
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
        BeforeValidator(_stops),
        Field(max_length=MAX_STOPS),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Extensions of llama.cpp's and vLLM's servers.
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    typical_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationParameters:
        if self.stream_options is not None and not self.stream:
            raise _refuse("'stream_options' needs 'stream': true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer; ``None`` is as many as fit."""
        raise NotImplementedError

    @property
    def top_tokens(self) -> int | None:
        """How many alternatives to report per token; ``None`` is no log-probabilities at all."""
        raise NotImplementedError


_AnswerTokens = Annotated[int, Field(ge=1, le=MAX_SESSION_TOKENS)]


class ChatRequest(GenerationParameters):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: _AnswerTokens | None = None
    max_completion_tokens: _AnswerTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _refuse("'top_logprobs' needs 'logprobs': true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _refuse("'max_tokens' and 'max_completion_tokens' differ; send one of them")
        return self

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(GenerationParameters):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]
    # OpenAI's default for this route.
    max_tokens: _AnswerTokens = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs


def parse_request(kind: type[_Request], body: bytes) -> _Request:
    """Read and validate a request body.

    Raises:
        BadParameter: not JSON, not an object, or a parameter is malformed, out of range or not supported; ``param``
            names it.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadParameter(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadParameter("the body must be a JSON object")
    try:
        return kind.model_validate(_supported(kind, fields))
    except ValidationError as error:
        raise _bad_parameter(error) from error


def _supported(kind: type[GenerationParameters], fields: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in fields.items():
        if value is None or name in IGNORED:
            continue
        if name in kind.model_fields:
            kept[name] = value
        elif name not in UNSUPPORTED:
            raise BadParameter(f"unknown parameter '{name[:100]}'", param=name[:100])
        elif not any(type(value) is type(harmless) and value == harmless for harmless in UNSUPPORTED[name]):
            allowed = " or ".join(repr(harmless) for harmless in UNSUPPORTED[name])
            hint = f" (only {allowed} is accepted)" if allowed else ""
            raise BadParameter(f"'{name}' is not supported{hint}", param=name)
    return kept


def _bad_parameter(error: ValidationError) -> BadParameter:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    if not param:
        return BadParameter(first["msg"])
    return BadParameter(f"'{param}': {first['msg']}", param=param)
