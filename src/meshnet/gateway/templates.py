"""Chat templates: the Jinja2 text stored in a GGUF, rendered the way Hugging Face's tokenizers do.

A template comes with a model file, so it is untrusted code: it runs in Jinja's immutable sandbox, every loop turn and
macro call counts against a time limit, and its output is bounded. (A template can still waste memory inside a single
filter call; it is as trusted as the artifact that the operator chose to serve.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshnet.errors import BadParameter

MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_RENDER_S = 2.0
#: Far above what fits the longest session (131,072 tokens).
MAX_OUTPUT_CHARS = 16 * 1024 * 1024

_MAX_PRODUCT = 10_000_000

# Monotonic seconds; of the rendering that runs in this context.
_deadline_s: ContextVar[float] = ContextVar("chat template deadline")


def render_chat(source: str, messages: Sequence[Mapping[str, Any]], *, bos_token: str = "", eos_token: str = "") -> str:
    """Render ``messages`` (each with ``role`` and ``content``) with the template ``source``, ready for an answer.

    Raises:
        BadParameter: the template is malformed, refuses the messages (``raise_exception``), or goes over its limits.
    """
    if len(source.encode()) > MAX_TEMPLATE_BYTES:
        raise BadParameter(f"the model's chat template is larger than {MAX_TEMPLATE_BYTES} bytes", param="model")
    variables = {
        "messages": [dict(message) for message in messages],
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": True,
        "tools": None,
        "documents": None,
    }
    _deadline_s.set(time.monotonic() + MAX_RENDER_S)
    parts = []
    size = 0
    try:
        for part in _compile(source).generate(variables):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise SecurityError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
            parts.append(part)
    except TemplateSyntaxError as error:
        raise BadParameter(f"the model's chat template is malformed: {error}", param="model") from error
    except TemplateError as error:
        raise BadParameter(
            f"the model's chat template does not accept these messages: {error}", param="messages"
        ) from error
    except RecursionError as error:
        raise BadParameter("the model's chat template recurses without end", param="messages") from error
    except Exception as error:
        # A template is a program: it can raise anything (TypeError, KeyError, ZeroDivisionError, ...).
        raise BadParameter(
            f"the model's chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error
    return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # Repeated text (or lists), and whole numbers without end.
        size = 1
        for side in (left, right):
            size *= abs(side) if isinstance(side, int) else len(side) if hasattr(side, "__len__") else 1
        if operator == "**" or size > _MAX_PRODUCT:
            raise SecurityError(f"'{operator}' is limited in chat templates")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def tick() -> None:
        """Called by every turn of every loop and by every macro."""
        if time.monotonic() > _deadline_s.get():
            raise SecurityError(f"it ran for longer than {MAX_RENDER_S:g} s")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; for rendering it is its body."""

    tags = {"generation"}  # noqa: RUF012 (declared as a plain set by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # Makes text out of nothing, as much as is asked for.
    environment.globals.pop("lipsum")
    tree = environment.parse(source)
    repeated: nodes.For | nodes.Macro | nodes.CallBlock
    for repeated in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):  # type: ignore[assignment]
        # Not by a name: a template could give that another meaning.
        tick = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None))
        repeated.body.insert(0, tick.set_lineno(repeated.lineno))
    tree.set_environment(environment)
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
