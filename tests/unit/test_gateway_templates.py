"""Chat templates: rendered as Hugging Face does, in a sandbox, within limits."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from meshnet.errors import BadParameter
from meshnet.gateway import templates
from meshnet.gateway.templates import render_chat

# The template of SmolLM2-135M-Instruct.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

USER = [{"role": "user", "content": "Hi <there> & you"}]


def test_a_real_template() -> None:
    assert render_chat(SMOLLM2, USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <there> & you<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert render_chat(source, USER) == "Hi <there> & you\nend"


def test_names_that_templates_use() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{{ strftime_now('%Y') }}{{ messages | tojson }}"
        "{% generation %}text{% endgeneration %}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}never{% endfor %}"
    )
    assert render_chat(source, USER, bos_token="<s>", eos_token="</s>") == (
        f'<s></s>{datetime.now():%Y}[{{"role": "user", "content": "Hi <there> & you"}}]text'
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "malformed"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ lipsum(10 ** 6) }}", "undefined|limited"),
        ("{{ 10 ** 10 ** 10 }}", "limited"),
        ("{{ 'a' * 1000000000 }}", "limited"),
        ("{{ ('a' * 90000) * 90000 }}", "limited"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{% for x in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "longer than"),
        ("x" * (templates.MAX_TEMPLATE_BYTES + 1), "larger than"),
    ],
)
def test_errors_of_a_template_are_the_clients_to_read(source: str, reason: str) -> None:
    with pytest.raises(BadParameter, match=reason):
        render_chat(source, USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% set xs = range(99999) %}"
        "{% for a in xs %}{% for b in xs %}{% for c in xs %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        # Names that a template takes over change nothing.
        "{% set tick = range %}{% set environment = {} %}{% set xs = range(99999) %}"
        "{% for a in xs %}{% for b in xs %}{% for c in xs %}{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_RENDER_S", 0.2)
    started = time.monotonic()
    with pytest.raises(BadParameter, match="ran for longer"):
        render_chat(source, USER)
    assert time.monotonic() - started < 5


def test_messages_are_not_changed_by_a_template() -> None:
    messages = [dict(USER[0])]
    with pytest.raises(BadParameter):
        render_chat("{{ messages[0].update({'content': 'x'}) }}", messages)
    assert messages == USER
