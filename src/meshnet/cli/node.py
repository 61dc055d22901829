"""``meshnet node``: lend this machine's capacity."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from meshnet.cli import credentials
from meshnet.core import LayerRange, Name
from meshnet.errors import UsageError

if TYPE_CHECKING:
    from meshnet.artifact.identity import FileStamp
    from meshnet.core import Shard
    from meshnet.node.worker import WorkerPlan

log = logging.getLogger(__name__)

DEFAULT_TRACKER = "http://127.0.0.1:8080"
TRACKER_ENVIRONMENT = "MESHNET_TRACKER"

TrackerOption = Annotated[str, typer.Option(help="URL of the tracker.", envvar=TRACKER_ENVIRONMENT)]
JoinTokenOption = Annotated[
    str | None,
    typer.Option(help="What `meshnet serve` printed. Others can see arguments: MESHNET_JOIN_TOKEN is safer."),
]


def node(
    model: Annotated[str, typer.Option(help="GGUF file.")],
    layers: Annotated[list[str], typer.Option(help="START:END, or all. Repeat it to serve several ranges.")],
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name that clients ask for. [default: the file's name without .gguf]")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="[default: all cores]")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens that one session may hold.")] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Sessions at once.")] = None,
    step_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens computed together.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(min=1, help="Prefill chunk, in tokens.")] = None,
    kv_type_k: Annotated[str | None, typer.Option(help="Type of cached keys, for example f16 or q8_0.")] = None,
    kv_type_v: Annotated[str | None, typer.Option(help="Type of cached values.")] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the worker. [default: the local address that reaches the tracker, a free port]"
        ),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="HOST or HOST:PORT under which others reach the worker (port forwarding).")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where this node's identity is kept. [default: STORE/nodes/1, 2, …]")
    ] = None,
    json_events: Annotated[bool, typer.Option("--json", help="Print a JSON line whenever a shard is ready.")] = False,
    engine: Annotated[str, typer.Option(hidden=True)] = "llama",
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
) -> None:
    """Serve layers of a model and report to a tracker, until SIGTERM or Ctrl-C.

    A worker that dies is started again. A tracker that does not answer is tried again for ever.
    """
    from meshnet.engines.native import WorkerOptions, find_worker
    from meshnet.node.address import choose_endpoint
    from meshnet.node.state import node_identity
    from meshnet.node.worker import WorkerPlan
    from meshnet.tracker.client import base_url

    ranges = [_parse_layers(text) for text in layers]
    if listen is not None and len(ranges) > 1 and not listen.endswith(":0"):
        raise UsageError(f"--listen {listen} is one port for {len(ranges)} workers; use port 0, or one node per range")
    token = credentials.join_token(join_token)
    binary = find_worker()
    endpoint = choose_endpoint(base_url(tracker), listen=listen, advertise=advertise)
    name = _checked_name(model_name) if model_name is not None else _default_name(model)
    digest, model_file = _identify(model, ranges) if engine == "llama" else (model, None)
    plans = [
        WorkerPlan(
            binary=binary,
            options=WorkerOptions(
                model=model,
                layers=range_,
                engine=engine,
                threads=threads,
                context_tokens=context,
                sessions=sessions,
                step_tokens=step_tokens,
                chunk_tokens=chunk_tokens,
                kv_type_k=kv_type_k,
                kv_type_v=kv_type_v,
            ),
            model_name=name,
            artifact_digest=digest,
            endpoint=endpoint,
            model_file=model_file,
        )
        for range_ in ranges
    ]
    with node_identity(state_dir) as node_id:
        asyncio.run(_run(node_id, tracker, token.value, plans, json_events=json_events, with_parent=exit_with_parent))


async def _run(
    node_id: str, tracker: str, token: str, plans: list[WorkerPlan], *, json_events: bool, with_parent: bool
) -> None:
    from meshnet.cli.stopping import stop_requests
    from meshnet.node.agent import Agent
    from meshnet.tracker.client import TrackerClient

    def on_ready(shard: Shard) -> None:
        if json_events:
            ready = {"event": "ready", "node_id": node_id, "shard": shard.model_dump(mode="json")}
            print(json.dumps(ready), flush=True)
        else:
            print(f"Node {node_id} serves layers {shard.layers} of {shard.model} at {shard.address}", flush=True)

    async with TrackerClient(tracker, token) as client:
        agent = Agent(node_id, client, plans, on_ready=on_ready)
        stop = asyncio.Event()

        def on_stop() -> None:
            if stop.is_set():
                agent.kill_workers()
            stop.set()

        with stop_requests(on_stop, with_parent=with_parent):
            await agent.run(stop)
    log.info("stopped")


def _parse_layers(text: str) -> LayerRange | None:
    if text == "all":
        return None
    try:
        return LayerRange.parse(text)
    except ValueError as error:
        raise UsageError(f"--layers {text}: {_first_message(error)}") from None


def _first_message(error: ValueError) -> str:
    faults = getattr(error, "errors", None)
    return str(faults()[0]["msg"]).removeprefix("Value error, ") if faults else str(error)


def _checked_name(name: str) -> str:
    try:
        return TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise UsageError(
            f"--model-name {name!r} is no name: write up to 200 letters, digits and : + . _ / @ -, "
            "the first a letter or digit"
        ) from None


def _default_name(model: str) -> str:
    stem = re.sub(r"\.gguf$", "", Path(model).name, flags=re.IGNORECASE)
    name = re.sub(r"[^A-Za-z0-9:+._@-]+", "-", stem).lstrip("-+._:@")[:200]
    if not name:
        raise UsageError(f"no name can be made from {model!r}; pass --model-name")
    return name


def _identify(model: str, ranges: list[LayerRange | None]) -> tuple[str, FileStamp]:
    """The artifact's digest, and the file as it was then."""
    from meshnet.artifact.identity import FileStamp, artifact_digest, read_layout

    path = Path(model)
    stamp = FileStamp.of(path)
    layout = read_layout(path)
    for layers in ranges:
        if layers is not None and layers.end > layout.n_layer:
            raise UsageError(f"--layers {layers} ends after the last layer: {path} has {layout.n_layer} layers")
    told_at = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= 2:
            told_at = time.monotonic()
            log.info("hashing %s: %.0f of %.0f MB", path, done_bytes / 1e6, total_bytes / 1e6)

    digest = artifact_digest(path, progress)
    stamp.check()
    return digest, stamp
