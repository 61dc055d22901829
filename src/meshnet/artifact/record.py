"""The record of an artifact in the store: which of its pieces are on the disk and were found right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshnet.artifact.disk import write_json

#: Size, modification time and inode of a file; None if there is none.
Stamp = list[int] | None


@dataclass(frozen=True)
class Record:
    """As long as the files have these ``stamps``, which they had when the record was made, they hold these pieces."""

    pieces: frozenset[int] = frozenset()
    stamps: tuple[Stamp, ...] = ()

    @classmethod
    def read(cls, path: Path, n_pieces: int) -> Record:
        """What ``path`` says; nothing if it is missing or damaged, which only means hashing what is there."""
        try:
            value = json.loads(path.read_bytes())
            pieces, stamps = value["pieces"], value["stamps"]
            if value["sha256"] != _sum(pieces, stamps):
                return cls()
            return cls(frozenset(pieces_from_hex(pieces, n_pieces)), tuple(stamps))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls()

    def write(self, path: Path) -> None:
        """Raises ``OSError``."""
        pieces, stamps = pieces_to_hex(self.pieces), list(self.stamps)
        write_json(path, {"pieces": pieces, "stamps": stamps, "sha256": _sum(pieces, stamps)})


def stamps_of(paths: Sequence[Path]) -> tuple[Stamp, ...]:
    """The stamps of files as they are now."""
    return tuple(_stamp(path) for path in paths)


def pieces_to_hex(pieces: Iterable[int]) -> str:
    """One bit for each piece."""
    bits = bytearray()
    for piece in pieces:
        byte = piece // 8
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        bits[byte] |= 1 << piece % 8
    return bits.hex()


def pieces_from_hex(text: str, n_pieces: int) -> set[int]:
    """Raises ``ValueError`` or ``TypeError`` if ``text`` was not written by `pieces_to_hex`."""
    bits = bytes.fromhex(text)
    return {piece for piece in range(min(n_pieces, 8 * len(bits))) if bits[piece // 8] >> piece % 8 & 1}


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _sum(pieces: Any, stamps: Any) -> str:
    return hashlib.sha256(json.dumps([pieces, stamps]).encode()).hexdigest()
