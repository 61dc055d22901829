"""What artifacts cost: hashing beside ``sha256sum``, pulling beside a plain libtorrent client, bytes per shard."""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libtorrent

from bench.cpu import Patience
from bench.plan import Plan
from bench.samples import Measure, Series, Timing, in_rounds
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library
from meshnet.artifact.local import local_artifact
from meshnet.artifact.manifest import total_bytes
from meshnet.artifact.provider import Provider, providing
from meshnet.artifact.sources import Address
from meshnet.artifact.store import store_root
from meshnet.artifact.swarm import SwarmOptions
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions, find_worker, needs_command
from meshnet.errors import UsageError, WorkerError

SHA256SUM = "sha256sum"
CREATE = "meshnet artifact create"
PLAIN = "plain libtorrent client"
PLAIN_TCP = "plain libtorrent client, TCP only"
PULL = "meshnet artifact pull"

_LOOPBACK = "127.0.0.1"
_OPTIONS = SwarmOptions(listen=f"{_LOOPBACK}:0")
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class ShardBytes:
    """What one shard reads, received, and keeps on the disk."""

    layers: LayerRange
    needed_bytes: int
    received_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Artifacts:
    """In the series, a token is a byte."""

    size_bytes: int
    piece_bytes: int
    hashing: dict[str, Series]
    pulling: dict[str, Series]
    shards: tuple[ShardBytes, ...]


async def measure_artifacts(model: Path, plan: Plan, patience: Patience, say: Callable[[str], None]) -> Artifacts:
    """Hash and pull ``model``, in rounds, and pull both halves of it.

    Raises:
        MeshnetError: a program is missing, or something failed.
    """
    bundle = create_bundle(model)  # the file is in memory from here on
    hashing: dict[str, Measure] = {SHA256SUM: _timed(model, _sha256sum), CREATE: _timed(model, _create)}
    hashed = await in_rounds(hashing, plan.rounds, plan.retries, patience, say, _mb_per_s)
    with _seeding(bundle, model) as seeder:

        async def plain() -> Timing:
            return await _plain_client(bundle, seeder)

        async def plain_tcp() -> Timing:
            return await _plain_client(bundle, seeder, enable_outgoing_utp=False)

        async def pull() -> Timing:
            return await _pull(bundle, seeder)

        pulling: dict[str, Measure] = {PLAIN: plain, PLAIN_TCP: plain_tcp, PULL: pull}
        pulled = await in_rounds(pulling, plan.rounds, plan.retries, patience, say, _mb_per_s)
    say("pulling halves")
    shards = await _halves(bundle, model)
    return Artifacts(bundle.artifact.size_bytes, bundle.artifact.piece_bytes, hashed, pulled, shards)


def _mb_per_s(timing: Timing) -> str:
    return f"{timing.tokens / timing.duration_us:.0f} MB/s"


# -------------------------------------------------------------------------------------------------------- hashing


def _timed(model: Path, work: Callable[[Path], Awaitable[None]]) -> Measure:
    size_bytes = model.stat().st_size

    async def measure() -> Timing:
        began, cpu_began = time.perf_counter(), _cpu_s()
        await work(model)
        elapsed_s, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_began
        return Timing(size_bytes, 1e6 * elapsed_s, cpu_us=1e6 * cpu_s)

    return measure


async def _sha256sum(model: Path) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            "sha256sum", "--", str(model), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise UsageError(f"cannot start sha256sum: {error.strerror}") from error
    if await process.wait():
        raise UsageError(f"sha256sum cannot read {model}")


async def _create(model: Path) -> None:
    await asyncio.to_thread(create_bundle, model)


def _cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# -------------------------------------------------------------------------------------------------------- pulling


@contextmanager
def _seeding(bundle: Bundle, model: Path) -> Iterator[Address]:
    """A plain libtorrent client that has all of it."""
    session = _plain_session()
    parameters = _plain_torrent(bundle, model)
    parameters.have_pieces = [True] * len(bundle.pieces)
    handle = session.add_torrent(parameters)
    yield _LOOPBACK, session.listen_port()
    del handle, session


async def _plain_client(bundle: Bundle, seeder: Address, **changes: Any) -> Timing:
    with _scratch() as directory:
        session = _plain_session(**changes)
        handle = session.add_torrent(_plain_torrent(bundle, directory / "model.gguf"))
        began = time.perf_counter()
        handle.connect_peer(seeder)
        async with asyncio.timeout(_DEADLINE_S):
            while not handle.status().is_seeding:
                await asyncio.to_thread(session.wait_for_alert, 20)
                session.pop_alerts()
        elapsed_s = time.perf_counter() - began
        del handle, session
    return Timing(bundle.artifact.size_bytes, 1e6 * elapsed_s)


async def _pull(bundle: Bundle, seeder: Address) -> Timing:
    with _scratch() as directory:
        library = Library(directory)
        provider = _provider(library, bundle, seeder)
        provider.want(range(len(bundle.pieces)))
        began = time.perf_counter()
        async with providing(provider), asyncio.timeout(_DEADLINE_S):
            await provider.wait_complete()
            elapsed_s = time.perf_counter() - began
    return Timing(bundle.artifact.size_bytes, 1e6 * elapsed_s)


def _provider(library: Library, bundle: Bundle, *peers: Address) -> Provider:
    return Provider(library, library.add(bundle), _OPTIONS, peers=peers, scrub_bytes_per_s=0)


def _plain_session(**changes: Any) -> Any:
    # Its defaults, but that it keeps to itself.
    settings: Any = {f"enable_{what}": False for what in ("dht", "lsd", "upnp", "natpmp")}
    settings |= {"listen_interfaces": f"{_LOOPBACK}:0", **changes}
    return libtorrent.session(settings)


def _plain_torrent(bundle: Bundle, path: Path) -> Any:
    parameters = libtorrent.add_torrent_params()
    parameters.ti = libtorrent.torrent_info(bundle.torrent)
    parameters.flags = libtorrent.torrent_flags.update_subscribe
    parameters.save_path = str(path.parent)
    parameters.renamed_files = {0: str(path)}
    return parameters


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=store_root()) as directory:
        yield Path(directory)


# --------------------------------------------------------------------------------------------------------- shards


async def _halves(bundle: Bundle, model: Path) -> tuple[ShardBytes, ...]:
    """Both halves at once, each from a node that has all, and from the other."""
    needed = [
        (layers, bundle.artifact.needed(layers, await _shared_tensors(model, layers)))
        for layers in bundle.artifact.divided(2)
    ]
    found = []
    async with AsyncExitStack() as stack:
        library = Library(stack.enter_context(_scratch()))
        whole = Provider(library, local_artifact(library, model), _OPTIONS, scrub_bytes_per_s=0)
        peers = [await _started(whole, stack)]
        providers = []
        for _, spans in needed:
            provider = _provider(Library(stack.enter_context(_scratch())), bundle, *peers)
            provider.want(bundle.pieces.covering(spans))
            providers.append(provider)
            peers.append(await _started(provider, stack))
        for provider, (layers, spans) in zip(providers, needed, strict=True):
            while not provider.state.complete or provider.state.swarm.missing_bytes:
                await provider.changed()
            received_bytes = provider.state.swarm.downloaded_bytes
            found.append(ShardBytes(layers, total_bytes(spans), received_bytes, provider.stored.disk_bytes()))
    return tuple(found)


async def _started(provider: Provider, stack: AsyncExitStack) -> Address:
    await stack.enter_async_context(providing(provider))
    while provider.port is None:
        await provider.changed()
    return _LOOPBACK, provider.port


async def _shared_tensors(model: Path, layers: LayerRange) -> list[str]:
    command = needs_command(find_worker(), WorkerOptions(model=str(model), layers=layers))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    for line in output.splitlines():
        event = json.loads(line)
        if event.get("event") == "needs":
            return list(event["shared_tensors"])
    raise WorkerError(f"the worker does not say what layers {layers} of {model} need")
