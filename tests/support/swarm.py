"""Swarms on loopback: artifacts with layers that are worth sharing, and real providers of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.library import Library
from meshnet.artifact.manifest import ByteSpan
from meshnet.artifact.provider import Provider, providing
from meshnet.artifact.stored import StoredArtifact
from meshnet.artifact.swarm import SwarmOptions
from meshnet.core import LayerRange

DEADLINE_S = 60.0
LOOPBACK = "127.0.0.1"
OPTIONS = SwarmOptions(listen=f"{LOOPBACK}:0")

_CHUNK_BYTES = 4 << 20

Peer = tuple[str, int]


def write_layers(path: Path, *, n_layer: int = 8, layer_bytes: int = 1 << 20, seed: int = 0) -> Path:
    """A GGUF of random bytes: an embedding and ``n_layer`` layers of ``layer_bytes`` each, and a head's norm."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(n_layer)
    writer.add_context_length(128)
    writer.add_token_list(["<s>", "</s>"])
    random = np.random.default_rng(seed)
    sizes = {"token_embd.weight": layer_bytes}
    for layer in range(n_layer):
        sizes[f"blk.{layer}.attn_q.weight"] = layer_bytes // 4
        sizes[f"blk.{layer}.ffn_up.weight"] = layer_bytes - layer_bytes // 4
    sizes["output_norm.weight"] = 4096
    for name, size in sizes.items():
        writer.add_tensor(name, np.frombuffer(random.bytes(size), dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def half(bundle: Bundle, *, tail: bool = False) -> frozenset[int]:
    """The pieces of one half of the layers."""
    first, second = bundle.artifact.divided(2)
    return pieces_for(bundle, second if tail else first)


def pieces_for(bundle: Bundle, layers: LayerRange, shared_tensors: Collection[str] | None = None) -> frozenset[int]:
    return frozenset(bundle.pieces.covering(bundle.artifact.needed(layers, shared_tensors)))


def everything(bundle: Bundle) -> frozenset[int]:
    return frozenset(range(len(bundle.pieces)))


def link(root: Path, bundle: Bundle, paths: Sequence[Path]) -> tuple[Library, StoredArtifact]:
    """A store at ``root`` that serves complete files from where they are."""
    library = Library(root)
    stored = library.add(bundle, paths)
    with stored.writing() as writer:
        assert writer is not None
        writer.adopt()
    return library, stored


@contextlib.asynccontextmanager
async def seeding(
    root: Path, bundle: Bundle, paths: Sequence[Path], options: SwarmOptions = OPTIONS, **more: Any
) -> AsyncIterator[Provider]:
    """A provider of complete files that are its own."""
    library, stored = link(root, bundle, paths)
    provider = Provider(library, stored, options, **more)
    provider.want(stored.verified())
    async with running(provider):
        yield provider


@contextlib.asynccontextmanager
async def pulling(
    root: Path, bundle: Bundle, wanted: Iterable[int], options: SwarmOptions = OPTIONS, **more: Any
) -> AsyncIterator[Provider]:
    """A provider with a store at ``root`` that fetches ``wanted``."""
    library = Library(root)
    provider = Provider(library, library.add(bundle), options, **more)
    provider.want(wanted)
    async with running(provider):
        yield provider


@contextlib.asynccontextmanager
async def running(provider: Provider) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``provider`` in the block, from when it listens."""
    async with providing(provider) as task:
        await until(lambda: provider.port is not None or task.done())
        yield task


async def complete(*providers: Provider, deadline_s: float = DEADLINE_S) -> None:
    """Wait until all have what they want."""
    async with asyncio.timeout(deadline_s):
        await asyncio.gather(*(provider.wait_complete() for provider in providers))


async def told_complete(provider: Provider) -> None:
    """Wait until the provider's state is one after its completion."""
    await until(lambda: provider.state.complete and provider.state.swarm.missing_bytes == 0)


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait for something that nobody tells of."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 (other processes and threads bring it about)
            await asyncio.sleep(0.02)


def address(provider: Provider) -> Peer:
    assert provider.port is not None
    return LOOPBACK, provider.port


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flip(path: Path, offset: int) -> None:
    """Change one bit, as a bad disk does."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def wrong_in_every_piece(bundle: Bundle, original: Path, path: Path) -> Path:
    """A file of the same size as ``original``, with one bit of every piece changed."""
    shutil.copyfile(original, path)
    for piece in range(len(bundle.pieces)):
        flip(path, bundle.pieces.span(piece).start)
    return path


def assert_same_bytes(paths: Sequence[Path], originals: Sequence[Path], spans: Iterable[ByteSpan]) -> None:
    """The files must hold what the originals do, in these spans."""
    for span in spans:
        with paths[span.file].open("rb") as file, originals[span.file].open("rb") as original:
            file.seek(span.start)
            original.seek(span.start)
            for start in range(span.start, span.end, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, span.end - start)
                assert file.read(size) == original.read(size), f"{span} differs from {start} on"


def assert_record_is_true(stored: StoredArtifact) -> None:
    """Whatever is on record must be on the disk, byte for byte."""
    assert stored.check(stored.verified())[1] == []
