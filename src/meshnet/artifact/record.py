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
    """As long as the files have these ``stamps``, which they had when the record was made, they hold these pieces.

    ``lost`` are the last pieces that were on record and found wrong, ``n_lost`` how many there have been in all: a
    piece may be repaired before those who computed with it have looked.
    """

    pieces: frozenset[int] = frozenset()
    stamps: tuple[Stamp, ...] = ()
    lost: tuple[int, ...] = ()
    n_lost: int = 0

    @classmethod
    def read(cls, path: Path, n_pieces: int) -> Record:
        """What ``path`` says; nothing if it is missing or damaged, which only means hashing what is there."""
        try:
            value = json.loads(path.read_bytes())
            pieces, stamps, lost, n_lost = (value[key] for key in ("pieces", "stamps", "lost", "n_lost"))
            if value["sha256"] != _sum(pieces, stamps, lost, n_lost):
                return cls()
            return cls(frozenset(pieces_from_hex(pieces, n_pieces)), tuple(stamps), tuple(lost), n_lost)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls()

    def write(self, path: Path) -> None:
        """Raises ``OSError``."""
        told = {
            "pieces": pieces_to_hex(self.pieces),
            "stamps": list(self.stamps),
            "lost": list(self.lost),
            "n_lost": self.n_lost,
        }
        write_json(path, {**told, "sha256": _sum(*told.values())})

    def lost_since(self, n_lost: int) -> frozenset[int] | None:
        """Pieces found wrong since there had been ``n_lost`` of them; None if that is not on record any more."""
        new = self.n_lost - n_lost
        if not 0 <= new <= len(self.lost):
            return None
        return frozenset(self.lost[len(self.lost) - new :])


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


def _sum(*told: Any) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
