"""Where a worker's model comes from: files of this machine, or an artifact that the store provides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Protocol

from meshnet.artifact.identity import FileStamps
from meshnet.artifact.pieces import PieceMap
from meshnet.artifact.provider import Provider
from meshnet.artifact.stored import StoredArtifact
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions, needs_command
from meshnet.errors import ArtifactError, WorkerError

_NEEDS_TIMEOUT_S = 300.0
_MAX_LINE_BYTES = 8 << 20


class ModelSource(Protocol):
    """The bytes that one worker maps."""

    async def prepare(self) -> None:
        """Wait until they are there and verified. Raises ``ArtifactError`` or ``StoreError`` if that cannot be."""
        ...

    def check(self) -> None:
        """Raises ``ArtifactError`` if they are not what they were when the worker started."""
        ...


class LocalModel:
    """Complete files, used where they are. ``stamps`` were taken when the artifact's digest was computed."""

    def __init__(self, stamps: FileStamps) -> None:
        self._stamps = stamps

    async def prepare(self) -> None:
        self.check()

    def check(self) -> None:
        self._stamps.check()


class ProvidedModel:
    """The pieces that one range of layers reads, kept in the store by ``provider``."""

    def __init__(self, provider: Provider, pieces: frozenset[int], layers: LayerRange) -> None:
        self._provider = provider
        self._pieces = pieces
        self._layers = layers
        self._n_lost = 0

    async def prepare(self) -> None:
        self._n_lost = self._provider.stored.n_lost()
        await self._provider.wait_for(self._pieces)

    def check(self) -> None:
        # Also what is repaired by now: the worker may have computed with it while it was wrong.
        stored = self._provider.stored
        lost = stored.lost_since(self._n_lost)
        wrong = self._pieces - stored.verified() | (self._pieces if lost is None else self._pieces & lost)
        if wrong:
            damage = stored.damage(min(wrong))
            raise ArtifactError(f"layers {self._layers} read from {len(wrong)} damaged pieces, first {damage}")


def is_whole(layers: LayerRange | None, n_layer: int) -> bool:
    return layers is None or (layers.start == 0 and layers.end >= n_layer)


async def needed_pieces(binary: Path, options: WorkerOptions, stored: StoredArtifact) -> frozenset[int]:
    """The pieces that a worker with ``options`` reads, told by the engine from the files' headers, which must be there.

    Raises:
        WorkerError: the engine refuses the range (its reason), or does not answer.
        ArtifactError: what it names is not in the manifest.
    """
    bundle = stored.bundle
    pieces: PieceMap = bundle.pieces
    told = await _ask(binary, options)
    layers = LayerRange(start=int(told["start"]), end=int(told["end"]))
    if is_whole(layers, int(told["n_layer"])):
        return frozenset(range(len(pieces)))
    return frozenset(pieces.covering(bundle.artifact.needed(layers, told["shared_tensors"])))


async def _ask(binary: Path, options: WorkerOptions) -> dict[str, Any]:
    try:
        process = await asyncio.create_subprocess_exec(
            *needs_command(binary, options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
    except OSError as error:
        raise WorkerError(f"cannot start {binary}: {error.strerror}") from error
    try:
        async with asyncio.timeout(_NEEDS_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise WorkerError(f"{binary} did not tell within {_NEEDS_TIMEOUT_S:g} s what it needs") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for line in reversed(output.decode(errors="replace").splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "needs":
            return event
        if isinstance(event, dict) and event.get("event") == "failed":
            raise WorkerError(f"the worker cannot serve these layers ({event.get('code')}): {event.get('message')}")
    raise WorkerError(f"{binary} did not tell what it needs: {errors.decode(errors='replace')[-500:].strip()}")
