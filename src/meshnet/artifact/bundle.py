"""What is published of an artifact and what a store keeps of it beside its bytes: manifest and torrent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshnet.artifact import torrent
from meshnet.artifact.hashing import HASH_BYTES
from meshnet.artifact.manifest import Artifact, Manifest
from meshnet.artifact.pieces import PieceMap


@dataclass(frozen=True)
class Bundle:
    """A manifest and the torrent that belongs to it. Made by `parse` or `of`, so that the two fit."""

    manifest: Manifest
    torrent: bytes
    #: 32 bytes per piece, in the order of `pieces`.
    piece_hashes: bytes

    @classmethod
    def of(cls, manifest: Manifest, piece_layers: list[bytes]) -> Bundle:
        """From the hashes of each file's pieces."""
        return cls(manifest, torrent.build_torrent(manifest, piece_layers), b"".join(piece_layers))

    @classmethod
    def parse(cls, manifest_json: bytes, torrent_data: bytes) -> Bundle:
        """From what another party sent.

        Raises:
            ArtifactError: malformed, or the torrent is not the manifest's.
        """
        manifest = Manifest.parse(manifest_json)
        return cls(manifest, torrent_data, b"".join(torrent.read_torrent(torrent_data, manifest)))

    @property
    def artifact(self) -> Artifact:
        return self.manifest.artifact

    @cached_property
    def digest(self) -> str:
        return self.manifest.digest

    @cached_property
    def info_hash(self) -> str:
        return torrent.info_hash(self.manifest)

    @cached_property
    def pieces(self) -> PieceMap:
        return PieceMap.of(self.artifact)

    def piece_hash(self, piece: int) -> bytes:
        return self.piece_hashes[piece * HASH_BYTES : (piece + 1) * HASH_BYTES]
