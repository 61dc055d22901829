"""``meshnet artifact publish``, ``pull`` and ``seed``: artifacts between machines."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet.cli import credentials
from meshnet.cli.node import DEFAULT_TRACKER, JoinTokenOption, TrackerOption, parse_layers
from meshnet.cli.node_events import Events, JsonEvents, LogEvents, progress_line
from meshnet.cli.progress import progress_of
from meshnet.cli.swarming import swarm_options
from meshnet.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from meshnet.artifact.bundle import Bundle
    from meshnet.artifact.library import Library
    from meshnet.artifact.provider import Provider
    from meshnet.artifact.stored import StoredArtifact
    from meshnet.tracker.client import TrackerClient

log = logging.getLogger(__name__)

PathArgument = Annotated[Path, typer.Argument(help="GGUF file (of a split set: any of its files), or a manifest.")]
NameOption = Annotated[str | None, typer.Option(help="Name that people ask for. [default: the file's name]")]
WebSeedOption = Annotated[
    list[str] | None, typer.Option(help="URL of the (first) file on a plain web server. Repeat it for several.")
]
ListenOption = Annotated[str | None, typer.Option("--listen", help="HOST:PORT for peers. [default: a free port]")]
UploadOption = Annotated[str | None, typer.Option(help="Most bytes per second to others, for example 2MB.")]
DownloadOption = Annotated[str | None, typer.Option(help="Most bytes per second from others.")]
ParentOption = Annotated[bool, typer.Option("--exit-with-parent", hidden=True)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]


def publish(
    path: PathArgument,
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    name: NameOption = None,
    web_seed: WebSeedOption = None,
) -> None:
    """Hand an artifact's manifest to the tracker, so that nodes can ask for it by digest or name.

    Somebody must hold the bytes: `meshnet artifact seed`, a node that has them, or a web seed.
    """
    bundle = _bundle(path, name, web_seed or [])
    token = credentials.join_token(join_token).value

    async def work() -> None:
        from meshnet.tracker.client import TrackerClient

        async with TrackerClient(tracker, token) as client:
            await client.publish(bundle)

    asyncio.run(work())
    print(f"published {bundle.manifest.name} ({bundle.digest})")


def seed(
    path: Annotated[
        str, typer.Argument(metavar="FILE|DIGEST|NAME", help="GGUF file, or an artifact that the store holds.")
    ],
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    name: NameOption = None,
    web_seed: WebSeedOption = None,
    listen: ListenOption = None,
    upload_limit: UploadOption = None,
    json_events: JsonOption = False,
    exit_with_parent: ParentOption = False,
) -> None:
    """Publish a model's files and serve them to other nodes from where they are, until SIGTERM or Ctrl-C.

    An artifact of the store is served as far as it is there.
    """
    from meshnet.artifact.library import Library

    library = Library()
    stored = _held(library, path, name, web_seed or [])
    bundle = stored.bundle
    token = credentials.join_token(join_token).value

    async def work(stack: AsyncExitStack, stop: asyncio.Event) -> None:
        from meshnet.tracker.client import TrackerClient

        client = await stack.enter_async_context(TrackerClient(tracker, token))
        await client.publish(bundle)
        provider = _provider(stored, client, token, listen, upload_limit, None)
        provider.want(stored.verified())
        fetching = await _providing(provider, stack)
        await _until(stop, provider.wait_complete(), fetching)
        if not stop.is_set():
            ready = {"event": "ready", "digest": bundle.digest, "name": bundle.manifest.name, "port": provider.port}
            print(json.dumps(ready) if json_events else f"seeding {bundle.manifest.name} ({bundle.digest})", flush=True)
        await _until(stop, stop.wait(), fetching)

    _run(work, with_parent=exit_with_parent)


def pull(
    wanted: Annotated[str, typer.Argument(metavar="DIGEST|NAME", help="A published artifact.")],
    layers: Annotated[
        list[str] | None, typer.Option(help="START:END: fetch what these layers need. [default: all]")
    ] = None,
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    web_seed: Annotated[
        list[str] | None, typer.Option(help="Base URL that the artifact's files are found below, besides its own.")
    ] = None,
    seed: Annotated[bool, typer.Option("--seed", help="Go on serving it to others afterwards.")] = False,
    patience_s: Annotated[float, typer.Option(min=1, help="Give up when nothing has arrived for so long.")] = 120.0,
    listen: ListenOption = None,
    upload_limit: UploadOption = None,
    download_limit: DownloadOption = None,
    json_events: JsonOption = False,
    exit_with_parent: ParentOption = False,
) -> None:
    """Fetch an artifact, or what some of its layers need, into the store. Safe to interrupt and to run again."""
    from meshnet.artifact.library import Library

    library = Library()
    ranges = [parse_layers(text) for text in layers or ["all"]]
    token = credentials.join_token(join_token).value
    events: Events = JsonEvents() if json_events else LogEvents()

    async def work(stack: AsyncExitStack, stop: asyncio.Event) -> None:
        from meshnet.node.provision import find_artifact
        from meshnet.tracker.client import TrackerClient

        client = await stack.enter_async_context(TrackerClient(tracker, token))
        stored = await find_artifact(client, library, wanted)
        artifact, pieces = stored.bundle.artifact, stored.bundle.pieces
        needed = frozenset(
            piece
            for range_ in ranges
            for piece in pieces.covering(artifact.needed(range_) if range_ else artifact.everything())
        )
        provider = _provider(stored, client, token, listen, upload_limit, download_limit, web_seed or ())
        provider.want(needed)
        fetching = await _providing(provider, stack)
        with progress_of(f"pulling {stored.bundle.manifest.name}") as show:
            await _until(stop, _pulled(provider, events, show, patience_s), fetching)
        if stop.is_set():
            return
        print(f"{stored.bundle.manifest.name} ({stored.digest}) is at {stored.paths[0]}", flush=True)
        if seed:
            await _until(stop, stop.wait(), fetching)

    _run(work, with_parent=exit_with_parent)


async def _pulled(provider: Provider, events: Events, show: Any, patience_s: float) -> None:
    """Wait until all is there.

    Raises:
        ArtifactError: nothing has arrived for too long; names who failed.
    """
    seen, seen_at = -1, time.monotonic()
    while not provider.is_complete():
        state = await provider.changed()
        events.progress(state)
        show(state.verified_bytes, state.wanted_bytes)
        if state.checking or not state.writing or state.verified_bytes != seen:
            seen, seen_at = state.verified_bytes, time.monotonic()
        elif time.monotonic() - seen_at > patience_s:
            told = "; ".join(f"{source}: {problem}" for source, problem in state.swarm.problems.items())
            raise ArtifactError(
                f"nothing of {provider.stored.bundle.manifest.name} has arrived for {patience_s:g} s "
                f"({progress_line(state)}): {told or 'nobody has it; run `meshnet artifact seed FILE` where it is'}"
            )
    events.progress(provider.state)


def _bundle(path: Path, name: str | None, web_seeds: list[str]) -> Bundle:
    from meshnet.artifact.bundle import Bundle
    from meshnet.artifact.create import create_bundle

    if path.name.endswith(".manifest.json"):
        if name or web_seeds:
            raise UsageError("name and web seeds are in the manifest already; make it anew to change them")
        torrent = path.with_name(path.name.removesuffix(".manifest.json") + ".torrent")
        try:
            return Bundle.parse(path.read_bytes(), torrent.read_bytes())
        except OSError as error:
            raise ArtifactError(f"{error.filename} cannot be read: {error.strerror}") from error
    with progress_of(f"hashing {path.name}") as progress:
        return create_bundle(path, name=name, web_seeds=web_seeds, progress=progress)


def _held(library: Library, path: str, name: str | None, web_seeds: list[str]) -> StoredArtifact:
    from meshnet.artifact.local import local_artifact

    if not Path(path).exists() and (stored := library.find(path)) is not None:
        if name or web_seeds:
            raise UsageError("name and web seeds of an artifact in the store are in its manifest already")
        return stored
    with progress_of(f"hashing {Path(path).name}") as progress:
        return local_artifact(library, Path(path), name=name, web_seeds=web_seeds, progress=progress)


def _provider(
    stored: StoredArtifact,
    client: TrackerClient,
    token: str,
    listen: str | None,
    upload_limit: str | None,
    download_limit: str | None,
    web_seeds: Any = (),
) -> Provider:
    from meshnet.artifact.library import Library
    from meshnet.artifact.provider import Provider
    from meshnet.node.address import choose_endpoint
    from meshnet.tracker.announce import announce_url

    endpoint = choose_endpoint(client.url, listen=listen)
    options = swarm_options(endpoint, listen, upload_limit, download_limit)
    return Provider(Library(), stored, options, trackers=[announce_url(client.url, token)], web_seeds=web_seeds)


async def _providing(provider: Provider, stack: AsyncExitStack) -> asyncio.Task[None]:
    from meshnet.artifact.provider import providing

    return await stack.enter_async_context(providing(provider))


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, Any], fetching: asyncio.Task[None]) -> None:
    """Wait for ``work``, a stop request or the failure of ``fetching``, whatever is first; raises what failed."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping, fetching], return_when=asyncio.FIRST_COMPLETED)
        for task in (working, fetching):
            if task.done():
                task.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _run(work: Any, *, with_parent: bool) -> None:
    from meshnet.cli.stopping import stop_requests

    async def run() -> None:
        stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            stack.enter_context(stop_requests(stop.set, with_parent=with_parent))
            await work(stack, stop)

    asyncio.run(run())
