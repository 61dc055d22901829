"""Pieces: the unit in which bytes are fetched and verified. File by file, each file begins with a piece of its own."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshnet.artifact.manifest import MAX_PIECES, MIN_PIECE_BYTES, Artifact, ByteSpan, Role, merged, total_bytes
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
        for span in self.widened(spans):
            first = self._first[span.file] + span.start // self.piece_bytes
            pieces.extend(range(first, first - (-len(span) // self.piece_bytes)))
        return pieces

    def widened(self, spans: Iterable[ByteSpan]) -> tuple[ByteSpan, ...]:
        """The bytes of the pieces that have a byte of ``spans``."""
        size = self.piece_bytes
        return merged(
            ByteSpan(span.file, span.start // size * size, min(-(-span.end // size) * size, self._sizes[span.file]))
            for span in spans
        )

    def bytes_of(self, pieces: Iterable[int]) -> int:
        return sum(len(self.span(piece)) for piece in pieces)


@dataclass(frozen=True)
class Share:
    """What a shard fetches, and which part of it is of use."""

    needed_bytes: int
    fetched_bytes: int

    @property
    def waste(self) -> float:
        """Bytes fetched in vain, relative to those that are needed."""
        return self.fetched_bytes / self.needed_bytes - 1


def share(
    artifact: Artifact,
    layers: LayerRange,
    *,
    piece_bytes: int | None = None,
    shared_tensors: Collection[str] | None = None,
) -> Share:
    """What a shard of ``layers`` fetches, with other pieces than the artifact's own if ``piece_bytes`` says so.

    Raises:
        ArtifactError: as `Artifact.needed`.
    """
    needed = artifact.needed(layers, shared_tensors)
    pieces = PieceMap([record.size_bytes for record in artifact.files], piece_bytes or artifact.piece_bytes)
    return Share(total_bytes(needed), total_bytes(pieces.widened(needed)))


def choose_piece_bytes(artifact: Artifact) -> int:
    """The largest piece with which even a shard of any single layer wastes at most 2 %, else the smallest there is.

    Never so small that there are more than `MAX_PIECES`.
    """
    sizes = [record.size_bytes for record in artifact.files]
    single = _SingleLayers(artifact)
    piece_bytes = LARGEST_CHOICE_BYTES
    while len(PieceMap(sizes, piece_bytes)) > MAX_PIECES:
        piece_bytes *= 2
    while (
        piece_bytes > MIN_PIECE_BYTES
        and len(PieceMap(sizes, piece_bytes // 2)) <= MAX_PIECES
        and not single.waste_little(PieceMap(sizes, piece_bytes))
    ):
        piece_bytes //= 2
    return piece_bytes


class _SingleLayers:
    """What shards of one layer each need, told apart once; in n log n, whatever the tensors look like."""

    def __init__(self, artifact: Artifact) -> None:
        own: dict[int, list[ByteSpan]] = defaultdict(list)
        common = list(artifact.headers())
        for tensor in artifact.tensors:
            if tensor.role is Role.SHARED:
                common.append(tensor.span)
            elif tensor.layer is not None and tensor.layer < artifact.n_layer:
                own[tensor.layer].append(tensor.span)
        for end in {0, artifact.n_layer - 1}:
            ends = artifact.shared_by_role(LayerRange(start=end, end=end + 1))
            own[end] += [tensor.span for tensor in ends if tensor.role is not Role.SHARED]
        self._common = merged(common)
        self._own = [merged(spans) for spans in own.values()]

    def waste_little(self, pieces: PieceMap) -> bool:
        common = _Bytes(pieces.widened(self._common))
        needed_common = total_bytes(self._common)
        for own in self._own:
            needed = needed_common + total_bytes(own)
            widened = pieces.widened(own)
            fetched = common.total + total_bytes(widened) - sum(map(common.within, widened))
            if fetched > needed * (1 + MAX_WASTE):
                return False
        return True


class _Bytes:
    """Counts the bytes of merged spans that are in another span."""

    def __init__(self, spans: Sequence[ByteSpan]) -> None:
        self._spans = spans
        self._starts = [(span.file, span.start) for span in spans]
        self._before = [0, *accumulate(len(span) for span in spans)]
        self.total = self._before[-1]

    def within(self, span: ByteSpan) -> int:
        return self._up_to(span.file, span.end) - self._up_to(span.file, span.start)

    def _up_to(self, file: int, at: int) -> int:
        number = bisect.bisect_left(self._starts, (file, at))
        before = self._before[number]
        if number and self._spans[number - 1].file == file:
            before -= max(0, self._spans[number - 1].end - at)
        return before
