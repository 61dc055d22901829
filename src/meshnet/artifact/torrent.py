"""The torrent of an artifact: BitTorrent v2 (BEP 52), private (BEP 27), one for all files of the model.

It follows from the manifest and the hashes of the pieces, so a torrent is checked by writing it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import libtorrent

from meshnet.artifact.hashing import HASH_BYTES, pieces_root
from meshnet.artifact.manifest import Manifest
from meshnet.errors import ArtifactError

#: 500,000 pieces.
MAX_TORRENT_BYTES = 17 << 20


def build_torrent(manifest: Manifest, piece_layers: Sequence[bytes]) -> bytes:
    """The torrent file; ``piece_layers`` are the hashes of each file's pieces."""
    artifact = manifest.artifact
    layers = {
        bytes.fromhex(record.pieces_root): layer
        for record, layer in zip(artifact.files, piece_layers, strict=True)
        if record.size_bytes > artifact.piece_bytes
    }
    return _bencode({b"info": _info(manifest), b"piece layers": layers})


def read_torrent(data: bytes, manifest: Manifest) -> list[bytes]:
    """The hashes of each file's pieces, checked against the manifest.

    Raises:
        ArtifactError: it is not this manifest's torrent.
    """
    if len(data) > MAX_TORRENT_BYTES:
        raise ArtifactError(f"the torrent is larger than {MAX_TORRENT_BYTES} bytes")
    try:
        layers = _bdecode(data)[b"piece layers"]
        found = [_layer(layers, manifest, number) for number in range(len(manifest.artifact.files))]
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"the torrent is malformed or of another artifact ({error!r})") from None
    if build_torrent(manifest, found) != data:
        raise ArtifactError("the torrent is not the one that follows from the manifest")
    return found


def info_hash(manifest: Manifest) -> str:
    """The swarm's name (hex, 64 digits); peers and trackers use its first 40."""
    return hashlib.sha256(_bencode(_info(manifest))).hexdigest()


def _bencode(value: Any) -> bytes:
    return bytes(libtorrent.bencode(value))


def _bdecode(data: bytes) -> Any:
    return libtorrent.bdecode(data)


def _layer(layers: Any, manifest: Manifest, number: int) -> bytes:
    artifact = manifest.artifact
    record = artifact.files[number]
    root = bytes.fromhex(record.pieces_root)
    if record.size_bytes <= artifact.piece_bytes:
        return root
    layer = layers[root]
    n_pieces = -(-record.size_bytes // artifact.piece_bytes)
    if not isinstance(layer, bytes) or len(layer) != n_pieces * HASH_BYTES:
        raise ValueError(f"file {number} does not have {n_pieces} pieces")
    if pieces_root(layer, artifact.piece_bytes) != root:
        raise ValueError(f"the hashes of file {number} do not lead to its root")
    return layer


def _info(manifest: Manifest) -> dict[bytes, Any]:
    artifact = manifest.artifact
    tree = {
        name.encode(): {b"": {b"length": record.size_bytes, b"pieces root": bytes.fromhex(record.pieces_root)}}
        for name, record in zip(manifest.file_names, artifact.files, strict=True)
    }
    return {
        b"file tree": tree,
        b"meta version": 2,
        b"name": (manifest.directory or manifest.file_names[0]).encode(),
        b"piece length": artifact.piece_bytes,
        b"private": 1,
    }
