"""``meshnet node``: lend this machine's capacity."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from meshnet.cli import credentials
from meshnet.cli.node_events import Events, JsonEvents, LogEvents
from meshnet.cli.swarming import swarm_options
from meshnet.core import LayerRange, Name
from meshnet.errors import UsageError

if TYPE_CHECKING:
    from meshnet.artifact.identity import FileStamps
    from meshnet.artifact.swarm import SwarmOptions
    from meshnet.engines.native import WorkerOptions
    from meshnet.node.address import Endpoint
    from meshnet.node.agent import Lending
    from meshnet.node.identity import NodeIdentity
    from meshnet.node.worker import WorkerPlan
    from meshnet.tracker.client import TrackerClient

T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_TRACKER = "http://127.0.0.1:8080"
TRACKER_ENVIRONMENT = "MESHNET_TRACKER"

TrackerOption = Annotated[str, typer.Option(help="URL of the tracker.", envvar=TRACKER_ENVIRONMENT)]
JoinTokenOption = Annotated[
    str | None,
    typer.Option(help="What `meshnet serve` printed. Others can see arguments: MESHNET_JOIN_TOKEN is safer."),
]


def node(
    layers: Annotated[
        list[str] | None,
        typer.Option(help="START:END, or all; repeat it to serve several ranges. [default: what the tracker assigns]"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="GGUF file on this machine (of a split set: any of its files).")
    ] = None,
    artifact: Annotated[
        str | None,
        typer.Option(
            help="Digest or name of a published artifact: fetches what the layers need. [default without --layers: "
            "whichever the tracker wants served]"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory to lend, for example 4GB, without --layers. [default: four fifths of what is free]"),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            help="Most that artifacts may take on the disk, without --layers. [default: what is free, the quota]"
        ),
    ] = None,
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name that clients ask for. [default: the file's or the artifact's name]")
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
    swarm_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for other nodes' downloads. [default: the worker's host, a free port]")
    ] = None,
    upload_limit: Annotated[
        str | None, typer.Option(help="Most bytes per second to other nodes, for example 2MB. [default: no limit]")
    ] = None,
    download_limit: Annotated[str | None, typer.Option(help="Most bytes per second from other nodes.")] = None,
    map_ports: Annotated[
        bool, typer.Option("--map-ports", help="Ask the router to forward the swarm's port (UPnP, NAT-PMP).")
    ] = False,
    json_events: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: how far the download is, and when a shard is ready.")
    ] = False,
    engine: Annotated[str, typer.Option(hidden=True)] = "llama",
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
) -> None:
    """Serve layers of a model and report to a tracker, until SIGTERM or Ctrl-C.

    With --layers, serve these. Without, lend memory and disk to the tracker, which says what to hold.
    A worker that dies after it was ready is started again; if the first one cannot start, the node ends and says why.
    A tracker that does not answer is tried again for ever.
    """
    from meshnet.engines.native import WorkerOptions, find_worker
    from meshnet.node.address import choose_endpoint
    from meshnet.node.capacity import parse_size
    from meshnet.node.state import node_identity
    from meshnet.tracker.client import base_url

    ranges = [parse_layers(text) for text in layers or ()]
    if ranges:
        _check_fixed(model, artifact, memory, disk)
    else:
        _check_lent(model=model, model_name=model_name, context=context, sessions=sessions)
    if listen is not None and len(ranges) != 1 and not listen.endswith(":0"):
        several = f"{len(ranges)} workers" if ranges else "any number of workers"
        raise UsageError(f"--listen {listen} is one port for {several}; use port 0, or one node per range")
    if model_name is not None:
        model_name = _checked_name(model_name)
    endpoint = choose_endpoint(base_url(tracker), listen=listen, advertise=advertise)
    node_ = _Node(
        binary=find_worker(),
        endpoint=endpoint,
        tracker=tracker,
        join_token=credentials.join_token(join_token).value,
        model_name=model_name,
        artifact=artifact,
        ranges=ranges,
        options=WorkerOptions(
            model=model or "",
            layers=None,
            engine=engine,
            threads=threads,
            context_tokens=context,
            sessions=sessions,
            step_tokens=step_tokens,
            chunk_tokens=chunk_tokens,
            kv_type_k=kv_type_k,
            kv_type_v=kv_type_v,
        ),
        memory_bytes=parse_size(memory, "--memory") if memory is not None else None,
        disk_bytes=parse_size(disk, "--disk") if disk is not None else None,
        swarm=swarm_options(endpoint, swarm_listen, upload_limit, download_limit, map_ports=map_ports),
        events=JsonEvents() if json_events else LogEvents(),
    )
    plans = _local_plans(node_) if model is not None else None
    with node_identity(state_dir) as identity:
        asyncio.run(_run(node_, identity, plans, with_parent=exit_with_parent))


@dataclass(frozen=True)
class _Node:
    """What was asked for. Without ``ranges`` the tracker chooses; ``options`` are those of every worker."""

    binary: Path
    endpoint: Endpoint
    tracker: str
    join_token: str
    model_name: str | None
    artifact: str | None
    ranges: list[LayerRange | None]
    options: WorkerOptions
    memory_bytes: int | None
    disk_bytes: int | None
    swarm: SwarmOptions
    events: Events

    @property
    def range_options(self) -> list[WorkerOptions]:
        return [replace(self.options, layers=layers) for layers in self.ranges]


async def _run(node_: _Node, identity: NodeIdentity, plans: list[WorkerPlan] | None, *, with_parent: bool) -> None:
    from meshnet.cli.stopping import stop_requests
    from meshnet.node.agent import Agent
    from meshnet.tracker.client import TrackerClient

    stop = asyncio.Event()
    agent: Agent | None = None

    def on_stop() -> None:
        if stop.is_set() and agent is not None:
            agent.kill_workers()
        stop.set()

    async with AsyncExitStack() as stack:
        stack.enter_context(stop_requests(on_stop, with_parent=with_parent))
        client = await stack.enter_async_context(TrackerClient(node_.tracker, node_.join_token))
        on_ready = partial(node_.events.ready, identity.node_id)
        fetching: asyncio.Task[None] | None = None
        if not node_.ranges:
            agent = Agent(identity, client, [], lending=_lending(node_, client), on_ready=on_ready)
        else:
            if plans is None:
                provided = await _unless(stop, _provide(node_, client, str(node_.artifact), stack))
                if provided is None:
                    return
                plans, fetching = provided
            agent = Agent(identity, client, plans, on_ready=on_ready)
        serving = asyncio.create_task(agent.run(stop))
        try:
            await asyncio.wait([serving, *([fetching] if fetching else [])], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            await serving
        if fetching is not None and fetching.done():
            fetching.result()
    log.info("stopped")


def _lending(node_: _Node, client: TrackerClient) -> Lending:
    """What a node without layers of its own offers, and how it gets what it is given."""
    from meshnet.artifact.library import Library
    from meshnet.node.agent import Lending
    from meshnet.node.capacity import Capacity
    from meshnet.node.providers import Providers, RangePreparation
    from meshnet.tracker.announce import announce_url

    library = Library()
    capacity = Capacity(
        library,
        memory_bytes=node_.memory_bytes,
        disk_limit_bytes=node_.disk_bytes,
        threads=node_.options.threads,
        artifact=node_.artifact,
    )
    log.info("lending %.1f GB of memory to the tracker", capacity.memory_bytes / 1e9)
    trackers = [announce_url(client.url, node_.join_token)]
    providers = Providers(client, library, node_.swarm, trackers=trackers, on_progress=node_.events.progress)
    return Lending(capacity, RangePreparation(providers, node_.binary, node_.options, node_.endpoint))


def _check_fixed(model: str | None, artifact: str | None, memory: str | None, disk: str | None) -> None:
    if (model is None) == (artifact is None):
        raise UsageError("name either --model FILE, on this machine, or --artifact DIGEST or NAME, to be fetched")
    if memory is not None or disk is not None:
        raise UsageError("--memory and --disk are lent to the tracker; with --layers the node takes what these need")


def _check_lent(**fixed: object) -> None:
    for name, value in fixed.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} goes with --layers; without --layers the tracker chooses what the node serves")


def _local_plans(node_: _Node) -> list[WorkerPlan]:
    """Plans over files of this machine, or for an engine that reads none."""
    from meshnet.artifact.create import default_name
    from meshnet.node.model import LocalModel
    from meshnet.node.worker import WorkerPlan

    model = node_.options.model
    name = node_.model_name
    source = None
    if node_.options.engine == "llama":
        first_file, digest, stamps = _identify(Path(model), node_.ranges)
        name = name or default_name(first_file)
        source = LocalModel(stamps)
        model = str(first_file)
    else:
        digest = model
    return [
        WorkerPlan(
            binary=node_.binary,
            options=replace(options, model=model),
            model_name=name or default_name(Path(model)),
            artifact_digest=digest,
            endpoint=node_.endpoint,
            source=source,
        )
        for options in node_.range_options
    ]


async def _provide(
    node_: _Node, client: TrackerClient, wanted: str, stack: AsyncExitStack
) -> tuple[list[WorkerPlan], asyncio.Task[None]]:
    """Plans over what the store fetches, and the fetching itself, which goes on as long as ``stack`` is open."""
    from meshnet.artifact.library import Library
    from meshnet.artifact.provider import Provider, providing
    from meshnet.node.provision import find_artifact, provide_ranges, until_complete
    from meshnet.node.worker import WorkerPlan
    from meshnet.tracker.announce import announce_url

    library = Library()
    stored = await find_artifact(client, library, wanted)
    trackers = [announce_url(client.url, node_.join_token)]
    provider = Provider(library, stored, node_.swarm, trackers=trackers)
    fetching = await stack.enter_async_context(providing(provider))
    ranges = await provide_ranges(provider, node_.binary, node_.range_options, node_.events.progress)
    progress = asyncio.create_task(until_complete(provider, node_.events.progress))
    stack.callback(progress.cancel)
    plans = [
        WorkerPlan(
            binary=node_.binary,
            options=options,
            model_name=node_.model_name or stored.bundle.manifest.name,
            artifact_digest=stored.digest,
            endpoint=node_.endpoint,
            source=source,
        )
        for options, source in ranges
    ]
    return plans, fetching


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` returns, or None if ``stop`` is set first (``work`` is then cancelled)."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def parse_layers(text: str) -> LayerRange | None:
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


def _identify(path: Path, ranges: list[LayerRange | None]) -> tuple[Path, str, FileStamps]:
    """The model's first file, the artifact's digest, and the files as they were then."""
    from meshnet.artifact.identity import FileStamps, artifact_digest, read_layout

    stamps = FileStamps.of_model(path)
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
    stamps.check()
    return layout.path, digest, stamps
