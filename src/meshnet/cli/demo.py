"""``meshnet demo``: a whole mesh on this machine, in real processes, asked one question."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from meshnet.artifact import store
from meshnet.cli import credentials
from meshnet.cli.bars import ByteBars, byte_bars
from meshnet.cli.node import TRACKER_ENVIRONMENT
from meshnet.cli.stopping import until_stopped
from meshnet.errors import MeshnetError

if TYPE_CHECKING:
    from meshnet.cli.ask import Gateway
    from meshnet.cli.children import Child, Children

T = TypeVar("T")

QUESTION = "Explain in two sentences why the sky is blue."
#: Loading half of a small model; hashing it the first time; a slow machine.
READY_TIMEOUT_S = 300.0
#: How often a long step says that it is still going on.
PROGRESS_S = 5.0
TEST_MODEL = "test:8"
_SCRATCH = "demo-"
_LOCK = "demo.lock"


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    keep: Annotated[bool, typer.Option("--keep", help="Stay up until Ctrl-C.", envvar="KEEP")] = False,
    max_tokens: Annotated[int, typer.Option(min=1)] = 120,
    engine: Annotated[str, typer.Option(hidden=True)] = "llama",
) -> None:
    """Chat with a small model split over two workers on this machine.

    Starts a tracker and gateway, a seeder that holds the model's file, and two nodes that each fetch what half of the
    layers need, on free loopback ports and with credentials of their own. Everything is stopped and removed at the end;
    the model stays in the store.
    """
    from meshnet.engines.native import find_worker

    find_worker()  # before a download that would be for nothing
    if engine == "llama":
        model, n_layer = _sample()
    else:
        model, n_layer = TEST_MODEL, 8
    with _scratch_directory(store.store_root()) as directory:
        mesh = _Mesh(directory, model, n_layer, engine)
        if asyncio.run(until_stopped(_demo(mesh, question, max_tokens, keep))):
            _step("stopped")
            raise typer.Exit(0 if keep else 130)


@contextlib.contextmanager
def _scratch_directory(root: Path) -> Iterator[Path]:
    """A directory that is removed with what is in it: at the end, or by the next demo if this one is killed."""
    for left in root.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError), (left / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=root) as name, (Path(name) / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


@dataclass(frozen=True)
class _Mesh:
    """What to start, with credentials that nobody else has."""

    directory: Path
    model: str
    n_layer: int
    engine: str
    api_key: str = field(default_factory=credentials.new_api_key)
    join_token: str = field(default_factory=credentials.new_join_token)

    @property
    def environment(self) -> dict[str, str]:
        return {
            credentials.API_KEY_ENVIRONMENT: self.api_key,
            credentials.JOIN_TOKEN_ENVIRONMENT: self.join_token,
        }

    def store_environment(self, name: str) -> dict[str, str]:
        """That of a process with a store of its own, as if it were a machine of its own."""
        if self.engine != "llama":
            return self.environment
        return {**self.environment, store.ENVIRONMENT: str(self.directory / name)}

    @property
    def halves(self) -> tuple[str, str]:
        middle = self.n_layer // 2
        return f"0:{middle}", f"{middle}:{self.n_layer}"


def _sample() -> tuple[str, int]:
    from meshnet.artifact.identity import read_layout
    from meshnet.artifact.samples import DEFAULT_SAMPLE, fetch_sample

    path = fetch_sample(DEFAULT_SAMPLE, _step)
    return str(path), read_layout(path).n_layer


async def _demo(mesh: _Mesh, question: str, max_tokens: int, keep: bool) -> None:
    from meshnet.cli.ask import connect
    from meshnet.cli.children import children
    from meshnet.cli.show import console, printable, telemetry_table

    async with children(mesh.directory) as started:
        url = await _start(mesh, started)
        async with connect(url, mesh.api_key) as gateway:
            model = await _patiently("waiting for a route", _first_model(gateway))
            _step(f"{model} is served by two workers")
            print(f"\n> {question}", flush=True)
            answer = await gateway.chat(
                model,
                [{"role": "user", "content": question}],
                on_text=lambda text: print(printable(text), end="", flush=True),
                options={"max_tokens": max_tokens, "temperature": 0},
            )
        print("\n")
        if answer.telemetry is None:
            raise MeshnetError("the answer came without telemetry; gateway and command are of different versions")
        console().print(telemetry_table(answer.telemetry))
        print(_how_to_call(mesh, url, model, keep), flush=True)
        if keep:
            ended = await started.any_ended()
            raise MeshnetError(f"{ended.name} ended by itself{ended.told()}")


async def _start(mesh: _Mesh, started: Children) -> str:
    """Start everything and wait until it is ready; returns the gateway's URL."""
    _step("starting tracker and gateway")
    state = mesh.directory / "tracker"
    serve = await started.start(
        "serve", ["serve", "--port", "0", "--json", "--state-dir", str(state)], mesh.environment
    )
    url = str((await _patiently("starting", serve.event(READY_TIMEOUT_S)))["url"])
    # Two workers share the machine: more threads than cores only get in each other's way.
    threads = max(1, (os.cpu_count() or 1) // 2)
    model = ["--model", mesh.model]
    if mesh.engine == "llama":
        model = ["--artifact", await _seed(mesh, started, url)]
    nodes: list[Child] = []
    for number, layers in enumerate(mesh.halves, start=1):
        _step(f"starting node {number} with layers {layers} of {mesh.n_layer}")
        options = [*model, "--layers", layers, "--tracker", url, "--threads", str(threads)]
        options += ["--engine", mesh.engine, "--state-dir", str(mesh.directory / f"node-{number}"), "--json"]
        environment = mesh.store_environment(f"store-{number}")
        nodes.append(await started.start(f"node {number}", ["node", *options], environment))
    with byte_bars([child.name for child in nodes]) as bars:
        ready = await _patiently("fetching and loading", asyncio.gather(*(_ready(child, bars) for child in nodes)))
    for child, event in zip(nodes, ready, strict=True):
        _step(f"{child.name} is ready at {event['shard']['address']}")
    return url


async def _seed(mesh: _Mesh, started: Children, url: str) -> str:
    """Start the process that holds the model; returns the artifact's digest."""
    _step("starting a seeder that holds the model")
    options = ["artifact", "seed", mesh.model, "--tracker", url, "--json"]
    seeder = await started.start("seeder", options, mesh.store_environment("store-seeder"))
    digest = str((await _patiently("hashing the model", seeder.event(READY_TIMEOUT_S)))["digest"])
    _step(f"the seeder serves {digest}")
    return digest


async def _ready(child: Child, bars: ByteBars) -> dict[str, Any]:
    """What a node says once it serves; until then its download is shown."""
    while True:
        event = await child.event(READY_TIMEOUT_S)
        if event.get("event") != "pull":
            return event
        bars.advance(child.name, event["verified_bytes"], event["wanted_bytes"])


async def _first_model(gateway: Gateway) -> str:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            models = await gateway.models()
            if models:
                return models[0]
            await asyncio.sleep(0.1)


async def _patiently(what: str, work: Awaitable[T]) -> T:
    """Await ``work``, and say every few seconds that it is still going on."""
    began = time.monotonic()
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=PROGRESS_S)
            if done:
                return task.result()
            _step(f"{what} ({time.monotonic() - began:.0f} s)")
    finally:
        task.cancel()
        # What it raises now is nobody's, and must not be taken for forgotten.
        await asyncio.gather(task, return_exceptions=True)


def _step(text: str) -> None:
    print(f"• {text}", flush=True)


def _how_to_call(mesh: _Mesh, url: str, model: str, keep: bool) -> str:
    api_key = mesh.api_key
    lead = "Call it yourself" if keep else "With --keep (or KEEP=1 make demo) it stays up, and you can call it yourself"
    return f"""{lead}:

curl {url}/v1/chat/completions -H 'Authorization: Bearer {api_key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "max_tokens": 100, "messages": [{{"role": "user", "content": "Hello"}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{api_key}")
messages = [{{"role": "user", "content": "Hello"}}]
answer = client.chat.completions.create(model="{model}", messages=messages, max_tokens=100)
print(answer.choices[0].message.content)

Look into it with `meshnet status`, `meshnet ledger` or `meshnet doctor`, which read these:

export {TRACKER_ENVIRONMENT}={url} {credentials.JOIN_TOKEN_ENVIRONMENT}={mesh.join_token}
""" + ("\nCtrl-C stops everything." if keep else "")
