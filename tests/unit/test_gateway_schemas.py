"""Requests: what is accepted, ignored, and refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshnet.errors import BadParameter
from meshnet.gateway.answers import sampling_params
from meshnet.gateway.schemas import ChatRequest, CompletionRequest, parse_request

USER = {"role": "user", "content": "x"}


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def test_defaults_are_those_of_openai() -> None:
    request = chat()
    assert (request.temperature, request.top_p, request.seed, request.stream) == (1.0, 1.0, None, False)
    assert request.answer_tokens is None
    assert request.top_tokens is None
    assert completion().answer_tokens == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 131_073}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1001]}, "stop[0]"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        # Less than a worker takes.
        ({"repeat_penalty": 0.001}, "repeat_penalty"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]"),
        ({"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"prediction": {}}, "prediction"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_a_bad_chat_parameter_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadParameter) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param.split("[")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "s"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_a_bad_completion_parameter_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadParameter) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"top_logprobs": 3}, "needs 'logprobs'"),
        ({"stream_options": {"include_usage": True}}, "needs 'stream'"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "differ"),
    ],
)
def test_parameters_that_contradict_each_other(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadParameter, match=reason):
        chat(**fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "temperature": 1e999}',
        b'{"model": "m", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_of_numbers_and_text(body: bytes) -> None:
    with pytest.raises(BadParameter):
        parse_request(CompletionRequest, body)


def test_what_asks_for_nothing_is_accepted() -> None:
    request = chat(
        n=1,
        tools=[],
        tool_choice="none",
        functions=None,
        response_format={"type": "text"},
        modalities=["text"],
        temperature=None,
        stop=None,
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        messages=[USER, {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None}],
    )
    assert request.temperature == 1.0
    assert request.messages[1].content == ""
    completion(echo=False, best_of=1, suffix=None, n=1)


def test_content_and_prompts_in_all_their_shapes() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts, "name": "boss"}])
    assert (request.messages[0].role, request.messages[0].content) == ("system", "a\nb")
    assert completion(prompt=["a"]).prompt == "a"
    assert completion(prompt=[1, 2]).prompt == [1, 2]
    assert completion(prompt=[[1, 2]]).prompt == [1, 2]
    assert chat(stop="x").stop == ["x"]
    assert chat(seed=-(2**70)).seed == -(2**70)
    assert chat(max_tokens=7).answer_tokens == chat(max_completion_tokens=7).answer_tokens == 7


def test_sampling_on_the_wire() -> None:
    plain = sampling_params(chat())
    assert (plain.penalty_last_n, plain.logprobs) == (0, 0)
    # 0 would turn top_p off on the wire.
    assert 0 < sampling_params(chat(top_p=0)).top_p < 1e-6
    assert sampling_params(chat(frequency_penalty=0.5)).penalty_last_n == -1
    assert sampling_params(chat(logprobs=True)).logprobs == 1
    assert sampling_params(chat(logprobs=True, top_logprobs=20)).logprobs == 21
    assert sampling_params(completion(logprobs=5)).logprobs == 6
    assert dict(sampling_params(chat(logit_bias={"7": -100})).logit_bias) == {7: -100.0}
