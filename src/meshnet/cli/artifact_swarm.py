"""``meshnet artifact publish``, ``seed`` and ``pull``: artifacts between machines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet.cli import credentials
from meshnet.cli.node import DEFAULT_TRACKER, JoinTokenOption, TrackerOption, parse_layers
from meshnet.cli.node_events import JsonEvents, progress_line
from meshnet.cli.progress import progress_of
from meshnet.cli.stopping import until_stopped
from meshnet.cli.swarming import swarm_options, web_seed_base
from meshnet.errors import ArtifactError, TrackerUnavailable, UsageError

if TYPE_CHECKING:
    from meshnet.artifact.bundle import Bundle
    from meshnet.artifact.library import Library
    from meshnet.artifact.provider import Provider, ProviderState
    from meshnet.artifact.stored import StoredArtifact
    from meshnet.artifact.swarm import SwarmOptions
    from meshnet.core import LayerRange
    from meshnet.tracker.client import TrackerClient

log = logging.getLogger(__name__)

#: Exit code of a pull that was stopped before it had everything, as a shell gives it after Ctrl-C.
STOPPED = 130

NameOption = Annotated[str | None, typer.Option(help="Name that people ask for. [default: from the file's name]")]
WebSeedOption = Annotated[
    list[str] | None, typer.Option(metavar="URL", help="Where a web server has the (first) file. Repeatable.")
]
ListenOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT for peers. [default: the local address that reaches the tracker, a free port]"),
]
UploadOption = Annotated[
    str | None, typer.Option(help="Most bytes per second to others, for example 2MB. [default: no limit]")
]
MapPortsOption = Annotated[
    bool, typer.Option("--map-ports", help="Ask the router to forward the port (UPnP, NAT-PMP).")
]
DownloadOption = Annotated[str | None, typer.Option(help="Most bytes per second from others.")]
ParentOption = Annotated[bool, typer.Option("--exit-with-parent", hidden=True)]


def publish(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="GGUF file (of a split set: any), or NAME.manifest.json with NAME.torrent beside it."
        ),
    ],
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    name: NameOption = None,
    web_seed: WebSeedOption = None,
) -> None:
    """Hand an artifact's manifest to the tracker, so that nodes can ask for it by digest or name.

    Somebody must hold the bytes: `meshnet artifact seed`, a node that has them, or a web seed.
    """
    from meshnet.tracker.client import base_url

    token = credentials.join_token(join_token).value
    base_url(tracker)  # before hashing, which can take minutes
    bundle = _bundle(path, name, web_seed or [])

    async def work() -> None:
        from meshnet.tracker.client import TrackerClient

        async with TrackerClient(tracker, token) as client:
            await client.publish(bundle)

    asyncio.run(work())
    print(f"published {bundle.manifest.name} ({bundle.digest})")


def seed(
    wanted: Annotated[
        str, typer.Argument(metavar="FILE|DIGEST|NAME", help="GGUF file, or an artifact that the store holds.")
    ],
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    name: NameOption = None,
    web_seed: WebSeedOption = None,
    listen: ListenOption = None,
    upload_limit: UploadOption = None,
    map_ports: MapPortsOption = False,
    json_events: Annotated[bool, typer.Option("--json", help="Print one JSON line when peers can connect.")] = False,
    exit_with_parent: ParentOption = False,
) -> None:
    """Publish a model's files and serve them to other machines from where they are, until SIGTERM or Ctrl-C.

    An artifact of the store is served as far as it is there.
    """
    from meshnet.artifact.library import Library

    sharing = _Sharing(tracker, join_token, listen, upload_limit, map_ports=map_ports)
    library = Library()
    stored = _held(library, wanted, name, web_seed or [])

    async def work() -> None:
        async with sharing.tracker_client() as client:
            await client.publish(stored.bundle)
            provider = sharing.provider(library, stored)
            provider.want(stored.verified())
            async with _providing(provider) as fetching:
                await _unless_it_fails(fetching, _seeded(provider, json_events))

    asyncio.run(until_stopped(work(), with_parent=exit_with_parent))


def pull(
    wanted: Annotated[str, typer.Argument(metavar="DIGEST|NAME", help="A published artifact.")],
    layers: Annotated[
        list[str] | None, typer.Option(help="START:END: fetch what these layers need. Repeatable. [default: all]")
    ] = None,
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    web_seed: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Another web server that has the (first) file, by its name. Repeatable."),
    ] = None,
    seed: Annotated[bool, typer.Option("--seed", help="Go on serving it to others afterwards, until Ctrl-C.")] = False,
    patience_s: Annotated[float, typer.Option(min=1, help="Give up when nothing has arrived for so long.")] = 120.0,
    listen: ListenOption = None,
    upload_limit: UploadOption = None,
    download_limit: DownloadOption = None,
    map_ports: MapPortsOption = False,
    json_events: Annotated[bool, typer.Option("--json", help="Print JSON lines: how far it is, and the end.")] = False,
    exit_with_parent: ParentOption = False,
) -> None:
    """Fetch an artifact, or what some of its layers need, into the store. Safe to interrupt and to run again."""
    from meshnet.artifact.library import Library

    sharing = _Sharing(tracker, join_token, listen, upload_limit, download_limit, map_ports=map_ports)
    ranges = [parse_layers(text) for text in layers or ["all"]]
    library = Library()
    complete = False

    async def work() -> None:
        nonlocal complete
        async with sharing.tracker_client() as client:
            stored = await _found(client, library, wanted, patience_s)
            bases = [web_seed_base(stored.bundle.manifest, url) for url in web_seed or ()]
            provider = sharing.provider(library, stored, bases)
            provider.want(_pieces(stored.bundle, ranges))
            async with _providing(provider) as fetching:
                with _shown(stored.bundle.manifest.name, json_events) as show:
                    await _unless_it_fails(fetching, _pulled(provider, show, patience_s))
                complete = True
                _tell_complete(stored, json_events)
                if seed:
                    await _unless_it_fails(fetching, _watch(provider))

    if asyncio.run(until_stopped(work(), with_parent=exit_with_parent)) and not complete:
        log.warning("stopped before everything was there; what has arrived is kept: run it again to go on")
        raise typer.Exit(STOPPED)


# ------------------------------------------------------------------------------------------------------ taking part


class _Sharing:
    """How this machine takes part, all options checked: before files are hashed, which can take minutes."""

    def __init__(
        self,
        tracker: str,
        join_token: str | None,
        listen: str | None,
        upload_limit: str | None,
        download_limit: str | None = None,
        *,
        map_ports: bool,
    ) -> None:
        from meshnet.node.address import choose_endpoint
        from meshnet.tracker.client import base_url

        self._tracker = base_url(tracker)
        self._token = credentials.join_token(join_token).value
        endpoint = choose_endpoint(self._tracker, listen=listen)
        self._options: SwarmOptions = swarm_options(endpoint, listen, upload_limit, download_limit, map_ports=map_ports)

    def tracker_client(self) -> TrackerClient:
        from meshnet.tracker.client import TrackerClient

        return TrackerClient(self._tracker, self._token)

    def provider(self, library: Library, stored: StoredArtifact, web_seeds: Sequence[str] = ()) -> Provider:
        from meshnet.artifact.provider import Provider
        from meshnet.tracker.announce import announce_url

        trackers = [announce_url(self._tracker, self._token)]
        return Provider(library, stored, self._options, trackers=trackers, web_seeds=web_seeds)


@contextlib.asynccontextmanager
async def _providing(provider: Provider) -> AsyncIterator[asyncio.Task[None]]:
    from meshnet.artifact.provider import providing

    async with providing(provider) as fetching:
        yield fetching


async def _unless_it_fails(fetching: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``; raises at once if ``fetching`` fails meanwhile."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait([working, fetching], return_when=asyncio.FIRST_COMPLETED)
        for task in (fetching, working):
            if task.done():
                task.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


# ----------------------------------------------------------------------------------------------------------- seeding


def _bundle(path: Path, name: str | None, web_seeds: Sequence[str]) -> Bundle:
    from meshnet.artifact.bundle import Bundle
    from meshnet.artifact.create import create_bundle

    if path.suffix == ".json":
        if name or web_seeds:
            raise UsageError(f"name and web seeds are in {path} already; make it anew to change them")
        torrent = path.with_name(path.name.removesuffix(".json").removesuffix(".manifest") + ".torrent")
        try:
            return Bundle.parse(path.read_bytes(), torrent.read_bytes())
        except OSError as error:
            raise ArtifactError(f"{error.filename} cannot be read: {error.strerror}") from error
    with progress_of(f"hashing {path.name}") as progress:
        return create_bundle(path, name=name, web_seeds=web_seeds, progress=progress)


def _held(library: Library, wanted: str, name: str | None, web_seeds: Sequence[str]) -> StoredArtifact:
    """The artifact of a file of this machine, or of the store."""
    from meshnet.artifact.local import local_artifact

    path = Path(wanted)
    if not path.exists():
        stored = library.find(wanted)
        if stored is None:
            raise ArtifactError(f"there is neither a file {wanted} nor such an artifact in the store")
        if name or web_seeds:
            raise UsageError("name and web seeds of an artifact in the store are in its manifest already")
        if not stored.verified():
            raise ArtifactError(f"the store has nothing of {stored.bundle.manifest.name} yet; pull it first")
        return stored
    with progress_of(f"hashing {path.name}") as progress:
        return local_artifact(library, path, name=name, web_seeds=web_seeds, progress=progress)


async def _seeded(provider: Provider, json_events: bool) -> None:
    """Tell when peers can connect, then watch."""
    while True:
        state = await provider.changed()
        if provider.port is not None:
            break
        if not state.writing:
            log.warning(
                "another process of this machine serves %s already; this one takes over when that ends",
                provider.stored.bundle.manifest.name,
            )
            break
    _tell_seeding(provider, json_events)
    await _watch(provider)


async def _watch(provider: Provider) -> None:
    """Never ends, unless what is served is not there any more.

    Raises:
        ArtifactError: nothing is left of files that are not the store's, so that nobody can repair them.
    """
    while True:
        state = await provider.changed()
        if provider.stored.links is not None and not state.verified_bytes:
            raise ArtifactError(
                f"{provider.stored.paths[0]} is not what was published as {provider.stored.bundle.manifest.name} any "
                "more, and is served no longer; bring the file back, or seed it anew as what it is now"
            )


def _tell_seeding(provider: Provider, json_events: bool) -> None:
    from meshnet.cli.show import size

    bundle, state = provider.stored.bundle, provider.state
    if json_events:
        event = {"event": "ready", "digest": bundle.digest, "name": bundle.manifest.name, "port": provider.port}
        print(json.dumps(event | {"bytes": state.verified_bytes}), flush=True)
        return
    whole = "" if state.verified_bytes == bundle.artifact.size_bytes else f" of {size(bundle.artifact.size_bytes)}"
    port = f" at port {provider.port}" if provider.port is not None else ""
    print(f"seeding {bundle.manifest.name} ({bundle.digest}), {size(state.verified_bytes)}{whole}{port}", flush=True)


# ----------------------------------------------------------------------------------------------------------- pulling


async def _found(client: TrackerClient, library: Library, wanted: str, patience_s: float) -> StoredArtifact:
    from meshnet.node.provision import find_artifact

    try:
        async with asyncio.timeout(patience_s):
            return await find_artifact(client, library, wanted)
    except TimeoutError:
        raise TrackerUnavailable(
            f"no answer from the tracker at {client.url} for {patience_s:g} s, and the store knows no {wanted!r}; "
            "is `meshnet serve` running there?"
        ) from None


def _pieces(bundle: Bundle, ranges: Sequence[LayerRange | None]) -> frozenset[int]:
    artifact = bundle.artifact
    spans = [span for range_ in ranges for span in (artifact.needed(range_) if range_ else artifact.everything())]
    return frozenset(bundle.pieces.covering(spans))


async def _pulled(provider: Provider, show: Callable[[ProviderState], None], patience_s: float) -> None:
    """Wait until all is there, and what was there before has been looked at.

    Raises:
        ArtifactError: nothing has arrived for too long; names who failed.
    """
    verified = useful = -1
    arrived_at = time.monotonic()
    while True:
        state = await provider.changed()
        show(state)
        if state.complete and not state.checking:
            return
        # Farther than ever: whoever sends wrong bytes again and again does not keep us waiting.
        if state.checking or state.verified_bytes > verified or state.swarm.useful_bytes > useful:
            arrived_at = time.monotonic()
        verified, useful = max(verified, state.verified_bytes), max(useful, state.swarm.useful_bytes)
        if time.monotonic() - arrived_at > patience_s:
            told = "; ".join(f"{source}: {problem}" for source, problem in state.swarm.problems.items())
            raise ArtifactError(
                f"nothing of {provider.stored.bundle.manifest.name} has arrived for {patience_s:g} s "
                f"({progress_line(state)}): {told or 'nobody has it; run `meshnet artifact seed FILE` where it is'}"
            )


@contextlib.contextmanager
def _shown(name: str, json_events: bool) -> Iterator[Callable[[ProviderState], None]]:
    """How a pull is told: JSON lines on standard output, or a bar (lines, without a terminal) on standard error."""
    if json_events:
        yield JsonEvents().progress
        return
    with progress_of(f"pulling {name}") as advance:
        waiting = False

        def show(state: ProviderState) -> None:
            nonlocal waiting
            other = not state.writing and not state.complete
            if other and not waiting:
                log.info("another process of this machine fetches it; waiting for that")
            waiting = other
            advance(state.verified_bytes, state.wanted_bytes)

        yield show


def _tell_complete(stored: StoredArtifact, json_events: bool) -> None:
    name, paths = stored.bundle.manifest.name, [str(path) for path in stored.paths]
    if json_events:
        print(json.dumps({"event": "complete", "digest": stored.digest, "name": name, "paths": paths}), flush=True)
    else:
        print(f"{name} ({stored.digest}) is at {paths[0]}", flush=True)
