"""Prompts: a chat, a text or token ids, and how each becomes tokens of the model's vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshnet.errors import BadParameter, HopRefused, PromptTooLong
from meshnet.gateway.hops import Hop
from meshnet.gateway.templates import render_chat
from meshnet.rpc.client import refusal_name
from meshnet.rpc.generated import shard_pb2 as pb

#: No token of a vocabulary stands for more bytes of text (the longest known are runs of 128 spaces). A text that cannot
#: fit whatever its tokens are is refused unread: megabytes of it would keep the head's vocabulary from everybody else.
MAX_TOKEN_BYTES = 256

_BAD_REQUEST = refusal_name(pb.REFUSAL_BAD_REQUEST)


@dataclass(frozen=True)
class ChatPrompt:
    """Messages with ``role`` and ``content``, for the model's chat template."""

    messages: Sequence[Mapping[str, str]]
    parameter = "messages"


@dataclass(frozen=True)
class TextPrompt:
    text: str
    parameter = "prompt"


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids, used as they are."""

    tokens: Sequence[int]
    parameter = "prompt"


#: ``parameter`` is the name of the request's parameter that holds it.
Prompt = ChatPrompt | TextPrompt | TokenPrompt


def guess_tokens(prompt: Prompt) -> int:
    """How many tokens it may be, for choosing a route before any vocabulary is at hand: a token is some four bytes."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.tokens)
    texts = (
        [prompt.text] if isinstance(prompt, TextPrompt) else [text for one in prompt.messages for text in one.values()]
    )
    return 1 + sum(len(text) for text in texts) // 4


async def prompt_tokens(
    prompt: Prompt, head: Hop, description: pb.DescribeResponse, *, limit_tokens: int, timeout_s: float
) -> list[int]:
    """Token ids of ``prompt``, at least one.

    ``description`` is that of the head's artifact; its worker tokenizes text, unless that is far too long for
    ``limit_tokens``. (Prompts that are only a little too long are returned; the caller counts.)

    Raises:
        BadParameter: there are no tokens, or some are not in the vocabulary; the model has no chat template, or its
            template does not accept the messages.
        PromptTooLong: the text cannot fit, whatever its tokens are.
        HopRefused, HopLost: of the head.
    """
    if isinstance(prompt, TokenPrompt):
        unknown = next((token for token in prompt.tokens if token >= description.n_vocab), None)
        if unknown is not None:
            raise BadParameter(
                f"token {unknown} is not in the model's vocabulary of {description.n_vocab} tokens",
                param=prompt.parameter,
            )
        tokens = list(prompt.tokens)
    else:
        text = await _text(prompt, description)
        _refuse_hopeless(text, limit_tokens, prompt.parameter)
        try:
            tokens = await head.worker.tokenize(
                head.ticket,
                text,
                # A template that writes the BOS token itself must not get a second one.
                add_special=not (description.bos_token and text.startswith(description.bos_token)),
                parse_special=True,
                timeout_s=timeout_s,
            )
        except HopRefused as error:
            if error.refusal == _BAD_REQUEST:
                raise BadParameter(str(error), param=prompt.parameter) from error
            raise
    if not tokens:
        raise BadParameter("the prompt has no tokens; send some text", param=prompt.parameter)
    return tokens


def _refuse_hopeless(text: str, limit_tokens: int, parameter: str) -> None:
    size_bytes = len(text.encode())
    if size_bytes <= limit_tokens * MAX_TOKEN_BYTES:
        return
    error = PromptTooLong(
        f"a session of this model holds {limit_tokens} tokens, but the prompt has {size_bytes} bytes of text, "
        f"which no {limit_tokens} tokens can be; shorten the prompt",
        requested_tokens=size_bytes // MAX_TOKEN_BYTES + 1,
        limit_tokens=limit_tokens,
    )
    error.param = parameter
    raise error


async def _text(prompt: ChatPrompt | TextPrompt, description: pb.DescribeResponse) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if not description.chat_template:
        raise BadParameter(
            "this model has no chat template, so it cannot chat; use /v1/completions with a plain prompt",
            param=prompt.parameter,
        )
    # In a thread: a template is foreign code and may take up to its time limit.
    return await asyncio.to_thread(
        render_chat,
        description.chat_template,
        prompt.messages,
        bos_token=description.bos_token,
        eos_token=description.eos_token,
    )
