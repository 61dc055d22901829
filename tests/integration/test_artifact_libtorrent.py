"""Our torrents and hashes are libtorrent's: it accepts the torrent and finds every piece of the files right."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import libtorrent
import pytest

from meshnet.artifact import create
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.manifest import MIN_PIECE_BYTES
from meshnet.artifact.samples import fetch_sample
from tests.support.small_gguf import small_model
from tests.support.split_models import split_model

DEADLINE_S = 60.0
PIECE = MIN_PIECE_BYTES
BLOCK = 16 << 10
SETTINGS: Any = {
    "listen_interfaces": "127.0.0.1:0",
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "alert_mask": libtorrent.alert.category_t.all_categories,
}


def made(path: Path, sizes: list[int], piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Bundle]:
    """A model in one file per size, filled up to that size, and its bundle; the directory that the torrent means."""
    path.mkdir()
    whole = path / "whole.gguf"
    whole.write_bytes(small_model().to_bytes())
    parts = split_model(whole, path / "set", len(sizes)) if len(sizes) > 1 else [whole]
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        data = part.read_bytes()
        assert len(data) <= size
        part.write_bytes(data + bytes((at * 7 + number) % 253 for at in range(size - len(data))))
    monkeypatch.setattr(create, "choose_piece_bytes", lambda artifact: piece_bytes)
    bundle = create_bundle(parts[0])
    assert [record.size_bytes for record in bundle.artifact.files] == sizes
    if len(sizes) > 1:
        assert bundle.manifest.directory is not None
        (path / "set").rename(path / bundle.manifest.directory)
    return path, bundle


def pieces_found(bundle: Bundle, directory: Path) -> list[bool]:
    """What libtorrent finds when it hashes all files anew."""
    session: Any = libtorrent.session(SETTINGS)
    parameters = libtorrent.add_torrent_params()
    parameters.ti = libtorrent.torrent_info(bundle.torrent)
    parameters.save_path = str(directory)
    parameters.flags = libtorrent.torrent_flags.upload_mode
    # Without a word about which pieces are there, so that all files are checked.
    handle = session.add_torrent(parameters)
    checked = failed = False
    deadline = time.monotonic() + DEADLINE_S
    while not checked and time.monotonic() < deadline:
        session.wait_for_alert(1000)
        for alert in session.pop_alerts():
            checked = checked or isinstance(alert, libtorrent.torrent_checked_alert)
            failed = failed or isinstance(alert, libtorrent.file_error_alert | libtorrent.torrent_error_alert)
    assert checked
    assert not failed
    status = handle.status(libtorrent.status_flags_t.query_pieces)
    session.remove_torrent(handle)
    return list(status.pieces)


LAYOUTS = {
    "less than a block": [9_000],
    "one block": [BLOCK],
    "a block and a byte": [BLOCK + 1],
    "less than a piece": [PIECE - 1],
    "a piece": [PIECE],
    "a piece and a byte": [PIECE + 1],
    "two pieces": [2 * PIECE],
    "three pieces": [3 * PIECE],
    "five pieces and a bit": [5 * PIECE + 777],
    "eight pieces": [8 * PIECE],
    "files of all kinds": [PIECE - 1, PIECE, PIECE + 1, BLOCK, 7 * PIECE + BLOCK],
    "files of whole pieces": [2 * PIECE, PIECE, 4 * PIECE],
}


@pytest.mark.parametrize("piece_bytes", [PIECE, 4 * PIECE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_libtorrent_finds_every_piece_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, piece_bytes: int
) -> None:
    directory, bundle = made(tmp_path / "m", LAYOUTS[layout], piece_bytes, monkeypatch)
    info: Any = libtorrent.torrent_info(bundle.torrent)
    assert info.is_valid()
    assert info.priv()
    hashes = info.info_hashes()
    assert (hashes.has_v1(), hashes.has_v2()) == (False, True)
    assert str(hashes.v2) == bundle.info_hash
    assert (info.piece_length(), info.num_pieces()) == (piece_bytes, len(bundle.pieces))
    storage = info.layout()
    # libtorrent fills up every file to whole pieces, in its imagination.
    real = [number for number in range(storage.num_files()) if not storage.file_flags(number) & storage.flag_pad_file]
    folder = f"{bundle.manifest.directory}/" if bundle.manifest.directory else ""
    for number, (theirs, record) in enumerate(zip(real, bundle.artifact.files, strict=True)):
        assert storage.file_path(theirs) == folder + bundle.manifest.file_names[number]
        assert storage.file_size(theirs) == record.size_bytes
        assert bytes(storage.root(theirs).to_bytes()).hex() == record.pieces_root
        assert info.map_file(theirs, 0, 1).piece == bundle.pieces.of_file(number)[0]
    assert pieces_found(bundle, directory) == [True] * len(bundle.pieces)


def test_libtorrent_finds_the_one_wrong_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, bundle = made(tmp_path / "m", [PIECE + 9, 3 * PIECE, 2 * PIECE], PIECE, monkeypatch)
    wrong = bundle.pieces.of_file(1)[2]
    span = bundle.pieces.span(wrong)
    assert bundle.manifest.directory is not None
    path = directory / bundle.manifest.directory / bundle.manifest.file_names[span.file]
    with path.open("r+b") as file:
        file.seek(span.end - 1)
        byte = file.read(1)
        file.seek(span.end - 1)
        file.write(bytes([byte[0] ^ 1]))
    assert pieces_found(bundle, directory) == [piece != wrong for piece in range(len(bundle.pieces))]


@pytest.mark.parametrize("n_files", [1, 3])
def test_libtorrent_finds_a_real_model_right(tmp_path: Path, n_files: int) -> None:
    source = fetch_sample("smollm2-135m-instruct")
    if n_files == 1:
        directory, bundle = source.parent, create_bundle(source)
    else:
        bundle = create_bundle(split_model(source, tmp_path / "set", n_files, empty_first=True)[0])
        assert bundle.manifest.directory is not None
        (tmp_path / "set").rename(tmp_path / bundle.manifest.directory)
        directory = tmp_path
    assert pieces_found(bundle, directory) == [True] * len(bundle.pieces)
