"""``meshnet chat``: one question, or a conversation."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet.cli import credentials
from meshnet.errors import MeshnetError

if TYPE_CHECKING:
    from meshnet.cli.ask import Answer

DEFAULT_URL = "http://127.0.0.1:8080"
URL_ENVIRONMENT = "MESHNET_URL"


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="The question. Without one, a conversation; - reads standard input.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="[default: the only one served]")] = None,
    url: Annotated[str, typer.Option(help="URL of the gateway.", envvar=URL_ENVIRONMENT)] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(help="Others can see arguments: MESHNET_API_KEY is safer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    telemetry: Annotated[bool, typer.Option(help="Show what each hop measured after an answer.")] = True,
) -> None:
    """Ask a served model; the answer streams as it is generated."""
    from meshnet.cli.ask import choose_model, connect

    key = credentials.api_key(api_key).value
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}

    async def find_model() -> str:
        async with connect(url, key) as gateway:
            return choose_model(await gateway.models(), model)

    async def answer_to(history: list[dict[str, str]]) -> Answer:
        async with connect(url, key) as gateway:
            return await gateway.chat(chosen, history, on_text=_write, options=options)

    # Asked for only if needed: the gateway says best why a named model cannot be had.
    chosen = model or asyncio.run(find_model())
    history = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        history.append({"role": "user", "content": sys.stdin.read() if prompt == "-" else prompt})
        _finish(asyncio.run(answer_to(history)), telemetry)
        return
    print(f"Talking to {chosen}. An empty line or Ctrl-D ends the conversation, Ctrl-C an answer.")
    while question := _read_line():
        history.append({"role": "user", "content": question})
        try:
            answer = asyncio.run(answer_to(history))
        except KeyboardInterrupt:
            print("\n(stopped)")
            history.pop()
        except MeshnetError as error:
            print(f"\nmeshnet: {error}", file=sys.stderr)
            history.pop()
        else:
            history.append({"role": "assistant", "content": answer.text})
            _finish(answer, telemetry)


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _write(text: str) -> None:
    from meshnet.cli.show import printable

    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _finish(answer: Answer, telemetry: bool) -> None:
    from meshnet.cli.show import console, telemetry_table

    print()
    if telemetry and answer.telemetry is not None:
        print()
        console().print(telemetry_table(answer.telemetry))
