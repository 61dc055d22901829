"""Hashes of model files: SHA-256 of each whole file, and the hash trees of BEP 52 over blocks of 16 KiB.

Both come from one pass over the file. Blocks are hashed by as many threads as there are cores, the whole file by one
more (SHA-256 cannot be divided); memory is bounded by the chunks that are under way.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from meshnet.errors import ArtifactError

BLOCK_BYTES = 16 << 10
HASH_BYTES = 32
_CHUNK_BYTES = 8 << 20

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FileHashes:
    """``piece_layer`` holds the 32-byte hash of every piece of the file; ``pieces_root`` is the root of its tree."""

    size_bytes: int
    mtime_ns: int
    sha256: str
    pieces_root: bytes
    piece_layer: bytes


def hash_files(
    paths: Sequence[Path], piece_bytes: int, *, threads: int | None = None, progress: Progress | None = None
) -> list[FileHashes]:
    """Hash all files, in order.

    Raises:
        ArtifactError: a file is empty, cannot be read, or changed its size meanwhile.
    """
    workers = threads or len(os.sched_getaffinity(0))
    try:
        sizes = [path.stat().st_size for path in paths]
    except OSError as error:
        raise ArtifactError(f"{error.filename} cannot be read: {error.strerror}") from error
    done_bytes = 0

    def advance(n_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += n_bytes
        if progress is not None:
            progress(done_bytes, sum(sizes))

    with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(1) as in_order:
        hashing = _Hashing(pool, in_order, workers, piece_bytes, advance)
        return [hashing.file(path, size) for path, size in zip(paths, sizes, strict=True)]


def piece_hash(data: bytes | memoryview, piece_bytes: int, *, alone: bool) -> bytes:
    """The hash of one piece. ``alone``: it is its file's only one, whose tree is no larger than it must be."""
    leaves = _leaves(data)
    return _root(leaves, _power_of_two(len(leaves)) if alone else piece_bytes // BLOCK_BYTES, bytes(HASH_BYTES))


def pieces_root(piece_layer: bytes, piece_bytes: int) -> bytes:
    """The root of a file's tree, from the hashes of its pieces."""
    hashes = [piece_layer[at : at + HASH_BYTES] for at in range(0, len(piece_layer), HASH_BYTES)]
    if len(hashes) == 1:
        return hashes[0]
    empty_piece = _root([], piece_bytes // BLOCK_BYTES, bytes(HASH_BYTES))
    return _root(hashes, _power_of_two(len(hashes)), empty_piece)


class _Hashing:
    def __init__(
        self,
        pool: ThreadPoolExecutor,
        in_order: ThreadPoolExecutor,
        workers: int,
        piece_bytes: int,
        advance: Callable[[int], None],
    ) -> None:
        self._pool = pool
        self._in_order = in_order
        self._limit = workers + 2
        self._piece_bytes = piece_bytes
        self._advance = advance

    def file(self, path: Path, size_bytes: int) -> FileHashes:
        if size_bytes == 0:
            raise ArtifactError(f"{path} is empty; fetch it again")
        alone = size_bytes <= self._piece_bytes
        chunk_bytes = max(_CHUNK_BYTES, self._piece_bytes)
        whole = hashlib.sha256()
        layer = bytearray()
        under_way: deque[tuple[Future[bytes], Future[None], int]] = deque()

        def settle() -> None:
            pieces, hashed, n_bytes = under_way.popleft()
            layer.extend(pieces.result())
            hashed.result()
            self._advance(n_bytes)

        try:
            with path.open("rb") as file:
                left = size_bytes
                while left:
                    chunk = file.read(min(chunk_bytes, left))
                    if not chunk:
                        raise ArtifactError(f"{path} became shorter while it was read; try again when it is complete")
                    left -= len(chunk)
                    pieces = self._pool.submit(_piece_hashes, chunk, self._piece_bytes, alone=alone)
                    under_way.append((pieces, self._in_order.submit(whole.update, chunk), len(chunk)))
                    if len(under_way) >= self._limit:
                        settle()
                while under_way:
                    settle()
                status = os.fstat(file.fileno())
                if status.st_size != size_bytes:
                    raise ArtifactError(f"{path} grew while it was read; try again when it is complete")
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
        piece_layer = bytes(layer)
        root = pieces_root(piece_layer, self._piece_bytes)
        return FileHashes(size_bytes, status.st_mtime_ns, whole.hexdigest(), root, piece_layer)


def _piece_hashes(chunk: bytes, piece_bytes: int, *, alone: bool) -> bytes:
    view = memoryview(chunk)
    return b"".join(
        piece_hash(view[at : at + piece_bytes], piece_bytes, alone=alone) for at in range(0, len(view), piece_bytes)
    )


def _leaves(data: bytes | memoryview) -> list[bytes]:
    view = memoryview(data)
    sha256 = hashlib.sha256
    return [sha256(view[at : at + BLOCK_BYTES]).digest() for at in range(0, len(view), BLOCK_BYTES)]


def _root(hashes: list[bytes], width: int, padding: bytes) -> bytes:
    """Root of a full binary tree of ``width`` (a power of two) leaves, the missing ones being ``padding``."""
    sha256 = hashlib.sha256
    level = hashes or [padding]
    while width > 1:
        if len(level) % 2:
            level.append(padding)
        level = [sha256(level[at] + level[at + 1]).digest() for at in range(0, len(level), 2)]
        padding = sha256(padding + padding).digest()
        width //= 2
    return level[0]


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
