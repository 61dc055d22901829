"""Pieces: the unit in which bytes are fetched and verified. File by file, each file begins with a piece of its own."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate

from meshnet.artifact.manifest import MIN_PIECE_BYTES, Artifact, ByteSpan, merged, total_bytes
from meshnet.core import LayerRange

#: Larger pieces save little and make every failed check dearer.
LARGEST_CHOICE_BYTES = 8 << 20
#: Bytes fetched beyond those that a shard needs, relative to the latter.
MAX_WASTE = 0.02


class PieceMap:
    """Which pieces a torrent (BEP 52) over files of these sizes has, numbered through all files."""

    def __init__(self, file_sizes: Sequence[int], piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._sizes = list(file_sizes)
        counts = [-(-size // piece_bytes) for size in file_sizes]
        self._first = [0, *accumulate(counts)]

    @classmethod
    def of(cls, artifact: Artifact) -> PieceMap:
        return cls([record.size_bytes for record in artifact.files], artifact.piece_bytes)

    def __len__(self) -> int:
        return self._first[-1]

    def of_file(self, file: int) -> range:
        """The pieces of one file."""
        return range(self._first[file], self._first[file + 1])

    def span(self, piece: int) -> ByteSpan:
        """Where a piece is. The last piece of a file may be short."""
        file = bisect.bisect_right(self._first, piece) - 1
        start = (piece - self._first[file]) * self.piece_bytes
        return ByteSpan(file, start, min(start + self.piece_bytes, self._sizes[file]))

    def covering(self, spans: Iterable[ByteSpan]) -> list[int]:
        """The pieces that have a byte of ``spans``, in order."""
        pieces: list[int] = []
        for span in merged(spans):
            first = self._first[span.file] + span.start // self.piece_bytes
            last = self._first[span.file] + (span.end - 1) // self.piece_bytes
            # Neighbouring spans may share a piece.
            pieces.extend(range(max(first, pieces[-1] + 1) if pieces else first, last + 1))
        return pieces

    def bytes_of(self, pieces: Iterable[int]) -> int:
        return sum(len(self.span(piece)) for piece in pieces)


def waste(artifact: Artifact, layers: LayerRange, piece_bytes: int) -> float:
    """Bytes that a shard fetches in vain, at the ends of what it needs, relative to what it needs."""
    needed = artifact.needed(layers)
    pieces = PieceMap([record.size_bytes for record in artifact.files], piece_bytes)
    return pieces.bytes_of(pieces.covering(needed)) / total_bytes(needed) - 1


def choose_piece_bytes(artifact: Artifact) -> int:
    """The largest piece with which even a shard of a single layer wastes at most 2 %, else the smallest there is."""
    piece_bytes = LARGEST_CHOICE_BYTES
    while piece_bytes > MIN_PIECE_BYTES and not _wastes_little(artifact, piece_bytes):
        piece_bytes //= 2
    return piece_bytes


def _wastes_little(artifact: Artifact, piece_bytes: int) -> bool:
    return all(
        waste(artifact, LayerRange(start=layer, end=layer + 1), piece_bytes) <= MAX_WASTE
        for layer in range(artifact.n_layer)
    )
