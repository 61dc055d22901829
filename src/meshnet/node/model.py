"""Where a worker's model comes from: files of this machine, or an artifact that the store provides."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Protocol

from meshnet.artifact.identity import FileStamps
from meshnet.artifact.pieces import PieceMap
from meshnet.artifact.provider import Provider
from meshnet.artifact.stored import StoredArtifact
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions, needs_command
from meshnet.errors import ArtifactError, RangeRefused, WorkerError

#: The worker's code for a range that is no legal cut.
ILLEGAL_CUT = "illegal_cut"
_NEEDS_TIMEOUT_S = 300.0
_MAX_LINE_BYTES = 8 << 20


class ModelSource(Protocol):
    """The bytes that one worker maps."""

    @property
    def pull_ms(self) -> int | None:
        """From the wish for them to their being there; None for files that were there."""
        ...

    def progress(self) -> tuple[int, int]:
        """Bytes verified, and bytes wanted; both 0 for files that were there."""
        ...

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

    @property
    def pull_ms(self) -> int | None:
        return None

    def progress(self) -> tuple[int, int]:
        return 0, 0

    async def prepare(self) -> None:
        self.check()

    def check(self) -> None:
        self._stamps.check()


class ProvidedModel:
    """The pieces that one range of layers reads, kept in the store by ``provider``. ``wished_s``: since when they are
    wanted, on the monotonic clock."""

    def __init__(
        self, provider: Provider, pieces: frozenset[int], layers: LayerRange, *, wished_s: float | None = None
    ) -> None:
        self._provider = provider
        self._pieces = pieces
        self._layers = layers
        self._wished_s = time.monotonic() if wished_s is None else wished_s
        self._wanted_bytes = provider.stored.bundle.pieces.bytes_of(pieces)
        self._pull_ms: int | None = None
        self._n_lost = 0

    @property
    def pull_ms(self) -> int | None:
        return self._pull_ms

    def progress(self) -> tuple[int, int]:
        stored = self._provider.stored
        return stored.bundle.pieces.bytes_of(self._pieces & stored.verified()), self._wanted_bytes

    async def prepare(self) -> None:
        self._n_lost = self._provider.stored.n_lost()
        await self._provider.wait_for(self._pieces)
        if self._pull_ms is None:
            self._pull_ms = round((time.monotonic() - self._wished_s) * 1000)

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
        RangeRefused: the engine cannot cut the range out (its reason).
        WorkerError: it cannot read the headers, or does not answer.
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
            kind = RangeRefused if event.get("code") == ILLEGAL_CUT else WorkerError
            raise kind(f"the worker cannot serve these layers ({event.get('code')}): {event.get('message')}")
    raise WorkerError(f"{binary} did not tell what it needs: {errors.decode(errors='replace')[-500:].strip()}")
