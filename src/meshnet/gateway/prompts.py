"""Prompts: a chat, a text or token ids, and how each becomes text for the model's own tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshnet.errors import BadParameter
from meshnet.gateway.templates import render_chat
from meshnet.rpc.generated import shard_pb2 as pb


@dataclass(frozen=True)
class ChatPrompt:
    """Messages with ``role`` and ``content``, for the model's chat template."""

    messages: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class TextPrompt:
    text: str


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids, used as they are."""

    tokens: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


async def text_of(prompt: ChatPrompt | TextPrompt, description: pb.DescribeResponse) -> str:
    """The text to tokenize.

    Raises:
        BadParameter: the model has no chat template, or its template does not accept the messages.
    """
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if not description.chat_template:
        raise BadParameter(
            "this model has no chat template, so it cannot chat; use /v1/completions with a plain prompt",
            param="messages",
        )
    # In a thread: a template is foreign code and may take up to its time limit.
    return await asyncio.to_thread(
        render_chat,
        description.chat_template,
        prompt.messages,
        bos_token=description.bos_token,
        eos_token=description.eos_token,
    )
