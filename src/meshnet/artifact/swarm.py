"""One artifact's swarm, by libtorrent: fetches the wanted pieces from peers and web seeds, and serves what is there.

No DHT, no local discovery, and no port mapping unless asked for. Peers come from the Meshnet
tracker, or are named by the caller. What libtorrent calls a finished piece is read back and recorded by the `Writer`
before it counts here.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import libtorrent

from meshnet.artifact.sources import Address, Sources
from meshnet.artifact.stored import Damage, Progress, Writer
from meshnet.artifact.swarm_settings import SwarmOptions as SwarmOptions
from meshnet.artifact.swarm_settings import session_settings
from meshnet.errors import ArtifactError, StoreError, UsageError

log = logging.getLogger(__name__)

#: Finished pieces are written, read back and recorded this often.
CONFIRM_EVERY_S = 1.0
_FLUSH_LIMIT_S = 10.0
#: A piece that libtorrent has finished and that cannot be read back for so long is fetched again.
READ_BACK_LIMIT_S = 20.0
#: Peers that the caller named are tried again this often, while something is missing, and when nothing is.
RECONNECT_EVERY_S = 5.0
OFFER_EVERY_S = 30.0
_LISTEN_LIMIT_S = 5.0
#: Leaving a torrent takes a few milliseconds, if the disk is not very slow.
_LEAVE_LIMIT_S = 10.0
_WANTED, _UNWANTED = 4, 0


@dataclass(frozen=True)
class SwarmState:
    """What is going on. Payload counts since the start, without protocol overhead; rates are bytes per second."""

    peers: int = 0
    web_seeds: int = 0
    #: Of what is wanted, not yet received.
    missing_bytes: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0
    wasted_bytes: int = 0
    download_rate: int = 0
    upload_rate: int = 0
    #: Who failed us and how, by address or URL; the tracker under its URL.
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def useful_bytes(self) -> int:
        """What was downloaded and not found wrong or superfluous; a piece may turn out to be so later."""
        return self.downloaded_bytes - self.wasted_bytes


@dataclass(frozen=True)
class _Payload:
    """Bytes that were on their way."""

    downloaded: int = 0
    uploaded: int = 0
    wasted: int = 0

    def __add__(self, status: Any) -> _Payload:
        return _Payload(
            self.downloaded + status.total_payload_download,
            self.uploaded + status.total_payload_upload,
            self.wasted + status.total_failed_bytes + status.total_redundant_bytes,
        )


def _file_numbers(torrent: Any) -> dict[str, int]:
    # libtorrent puts padding between the files of a split set, and counts it as files.
    files = torrent.layout()
    padding = libtorrent.file_storage.flag_pad_file
    numbers = range(files.num_files())
    return {files.file_name(number): number for number in numbers if not files.file_flags(number) & padding}


class Swarm:
    """Membership in the swarm of one artifact, with a port of its own. Not for several threads at once."""

    def __init__(
        self,
        writer: Writer,
        options: SwarmOptions,
        *,
        trackers: Sequence[str] = (),
        peers: Sequence[Address] = (),
    ) -> None:
        """Join.

        Raises:
            UsageError: it cannot listen as told.
        """
        self._writer = writer
        self._bundle = writer.stored.bundle
        files = range(1, len(self._bundle.artifact.files))
        self._starts = [self._bundle.pieces.of_file(file).start for file in files]
        self._options = options
        self._trackers = list(trackers)
        self._sources = Sources(self._bundle.manifest.name)
        self._peers = list(peers)
        self._reconnect_at = 0.0
        self._wanted: frozenset[int] = frozenset()
        self._asked: frozenset[int] = frozenset()
        self._finished_at: dict[int, float] = {}
        #: What is on its way from libtorrent's memory into the files.
        self._flushing: Set[int] | None = None
        self._is_flushed = False
        self._flushed_at = 0.0
        self._misread: str | None = None
        self._before = _Payload()
        self._session: Any = libtorrent.session(session_settings(options))
        self.port = self._listen()
        self._handle: Any = self._add()

    def want(self, pieces: Iterable[int]) -> None:
        """Fetch these pieces, and no others; nothing into files that are not the store's."""
        wanted = frozenset(pieces)
        if wanted != self._wanted:
            self._wanted = wanted
            self._ask()

    def offer(self, web_seeds: Sequence[str], problems: Mapping[str, str]) -> None:
        """Fetch from these web seeds too, which were found usable just now; ``problems`` are those of others."""
        for url in self._sources.web_seeds:
            self._handle.remove_url_seed(url)
        self._sources.offer(web_seeds, problems)
        self._ask()
        for url in self._sources.web_seeds:
            self._handle.add_url_seed(url)

    @property
    def lost_redirect(self) -> bool:
        """True if a web seed should be asked anew where its files are."""
        return self._sources.lost_redirect

    def step(self, wait_s: float) -> SwarmState:
        """Wait a moment, look at what happened, record what arrived.

        Raises:
            StoreError: the disk is full or failed.
            ArtifactError: libtorrent gave up on the torrent.
        """
        self._session.wait_for_alert(int(wait_s * 1000))
        for alert in self._session.pop_alerts():
            self._look_at(alert)
        status = self._status()
        if status.errc.value() and self._misread is None:
            raise ArtifactError(f"the swarm of {self._bundle.manifest.name} failed: {status.errc.message()}")
        self._confirm(status)
        self._ask()
        peers = self._handle.get_peer_info()
        self._reconnect(status, peers)
        return self._state(status, peers)

    def refetch(self, pieces: Iterable[int]) -> None:
        """Take pieces off the record and fetch them again."""
        # libtorrent takes back no piece; it has to be told anew what is there.
        self._leave()
        self._writer.forget(pieces)
        self._handle = self._add()

    def reload(self, progress: Progress | None = None) -> list[Damage]:
        """Look at what is on the disk now, because files were touched; gives recorded pieces that were not right.

        Raises:
            StoreError: it cannot be read, although nothing is wrong with it.
            ArtifactError: as `Writer.recover`.
        """
        misread, self._misread = self._misread, None
        self._leave()
        damage = self._writer.recover(progress, doubt=misread is not None)
        if misread is not None and not damage:
            raise StoreError(f"{misread}; have the disk checked")
        self._handle = self._add()
        return damage

    @property
    def is_astray(self) -> bool:
        """True if the files are not what they were, so that `reload` is due."""
        return self._misread is not None or self._writer.stored.is_displaced()

    @property
    def missing_bytes(self) -> int:
        """Of what is wanted, not yet received now."""
        return self._missing_bytes(self._handle.status())

    def close(self) -> None:
        """Leave, and record what arrived last. Nothing is written to the files afterwards."""
        try:
            if self._handle is not None:
                status = self._status()
                self._leave()
                self._writer.confirm(self._finished(status))
        finally:
            # Waits until libtorrent's threads have ended.
            self._session = None

    # ------------------------------------------------------------------------------------------------ joining

    def _listen(self) -> int:
        """The port to listen at, once it does."""
        port = 0

        def look(alert: Any) -> bool:
            nonlocal port
            if isinstance(alert, libtorrent.listen_failed_alert):
                raise UsageError(f"cannot listen for peers at {self._options.listen}: {alert.error.message()}")
            if isinstance(alert, libtorrent.listen_succeeded_alert):
                port = int(alert.port)
            return port != 0

        if not self._await_alert(look, _LISTEN_LIMIT_S):
            raise UsageError(f"cannot listen for peers at {self._options.listen}: no such address on this machine")
        return port

    def _add(self) -> Any:
        stored = self._writer.stored
        parameters = libtorrent.add_torrent_params()
        parameters.ti = libtorrent.torrent_info(self._bundle.torrent)
        parameters.flags = libtorrent.torrent_flags.update_subscribe
        if stored.links is not None:
            # Serves only: libtorrent must not write to what is not the store's.
            parameters.flags |= libtorrent.torrent_flags.upload_mode
        parameters.save_path = str(stored.directory)
        # Ours are under files/, whatever the torrent is called; links are somewhere else altogether.
        numbers = _file_numbers(parameters.ti)
        names = self._bundle.manifest.file_names
        parameters.renamed_files = {numbers[name]: str(path) for name, path in zip(names, stored.paths, strict=True)}
        verified = self._writer.verified
        parameters.have_pieces = [piece in verified for piece in range(len(self._bundle.pieces))]
        parameters.trackers = self._trackers
        parameters.url_seeds = list(self._sources.web_seeds)
        parameters.banned_peers = self._sources.banned_peers
        parameters.storage_mode = libtorrent.storage_mode_t.storage_mode_sparse
        self._finished_at, self._flushing = {}, None
        self._asked = self._askable()
        parameters.piece_priorities = self._priorities()
        self._reconnect_at = 0.0
        handle = self._session.add_torrent(parameters)
        handle.set_upload_limit(self._options.upload_limit_bytes_per_s)
        handle.set_download_limit(self._options.download_limit_bytes_per_s)
        return handle

    def _leave(self) -> None:
        """Leave, and wait until all that libtorrent had received is in the files."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._before += handle.status()
        handle.pause()
        if not self._await_alert(lambda alert: isinstance(alert, libtorrent.torrent_paused_alert), _LEAVE_LIMIT_S):
            log.warning("the disk takes long to write %s", self._bundle.manifest.name)
        self._session.remove_torrent(handle)

    def _await_alert(self, is_it: Callable[[Any], bool], limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while (left_s := until - time.monotonic()) > 0:
            self._session.wait_for_alert(int(left_s * 1000) + 1)
            alerts = self._session.pop_alerts()
            for alert in alerts:
                self._sources.hear(alert)
            if any(map(is_it, alerts)):
                return True
        return False

    def _ask(self) -> None:
        """Have libtorrent ask for what is to be asked for now."""
        asked = self._askable()
        if asked != self._asked:
            self._asked = asked
            self._handle.prioritize_pieces(self._priorities())

    def _askable(self) -> frozenset[int]:
        if self._writer.stored.links is not None:
            return frozenset()
        if not self._starts or not self._sources.web_seeds:
            return self._wanted
        here = self._writer.verified | self._finished_at.keys()
        return self._wanted - self._sources.waiting(self._starts, self._wanted - here)

    def _priorities(self) -> list[int]:
        return [_WANTED if piece in self._asked else _UNWANTED for piece in range(len(self._bundle.pieces))]

    def _reconnect(self, status: Any, peers: Sequence[Any]) -> None:
        now = time.monotonic()
        if now < self._reconnect_at:
            return
        self._reconnect_at = now + (OFFER_EVERY_S if status.is_finished else RECONNECT_EVERY_S)
        connected = {tuple(peer.ip) for peer in peers}
        for peer in self._peers:
            if peer not in connected:
                self._handle.connect_peer(peer)

    # ------------------------------------------------------------------------------------------------ receiving

    def _confirm(self, status: Any) -> None:
        """Record finished pieces, once they are in the files: libtorrent keeps them in memory for as long as it can."""
        finished = self._finished(status)
        if not finished:
            return
        now = time.monotonic()
        if self._flushing is None:
            complete = self._wanted <= self._writer.verified | finished.keys()
            if complete or now - self._flushed_at >= CONFIRM_EVERY_S:
                self._flushing, self._is_flushed = finished.keys(), False
                self._handle.flush_cache()
        elif self._is_flushed or now - self._flushed_at >= _FLUSH_LIMIT_S:
            self._writer.confirm(self._flushing & finished.keys())
            self._flushing, self._flushed_at = None, now
            lost = [piece for piece, at in self._finished(status).items() if now - at > READ_BACK_LIMIT_S]
            if lost:
                log.error("%s; fetching it again", self._writer.stored.damage(lost[0]))
                self.refetch(lost)

    def _status(self) -> Any:
        """With pieces, if libtorrent has some that the record has not: there may be half a million of them."""
        status = self._handle.status()
        if status.num_pieces != len(self._writer.verified):
            status = self._handle.status(libtorrent.status_flags_t.query_pieces)
        return status

    def _finished(self, status: Any) -> dict[int, float]:
        """Pieces that libtorrent has and the record has not, and since when."""
        now = time.monotonic()
        verified = self._writer.verified
        finished = [piece for piece, there in enumerate(status.pieces) if there and piece not in verified]
        self._finished_at = {piece: self._finished_at.get(piece, now) for piece in finished}
        return self._finished_at

    def _state(self, status: Any, peers: Sequence[Any]) -> SwarmState:
        payload = self._before + status
        return SwarmState(
            peers=sum(peer.connection_type == peer.standard_bittorrent for peer in peers),
            web_seeds=len(self._sources.web_seeds),
            missing_bytes=self._missing_bytes(status),
            downloaded_bytes=payload.downloaded,
            uploaded_bytes=payload.uploaded,
            wasted_bytes=payload.wasted,
            download_rate=status.download_payload_rate,
            upload_rate=status.upload_payload_rate,
            problems=self._sources.problems,
        )

    def _missing_bytes(self, status: Any) -> int:
        own = self._writer.stored.links is None
        waiting = self._wanted - self._asked if own and self._wanted is not self._asked else ()
        return int(status.total_wanted - status.total_wanted_done + self._bundle.pieces.bytes_of(waiting))

    def _look_at(self, alert: Any) -> None:
        if isinstance(alert, libtorrent.file_error_alert):
            self._file_failed(alert)
        elif isinstance(alert, libtorrent.torrent_error_alert):
            raise ArtifactError(f"the swarm of {self._bundle.manifest.name} failed: {alert.error.message()}")
        elif isinstance(alert, libtorrent.cache_flushed_alert):
            self._is_flushed = True
        else:
            self._sources.hear(alert)

    def _file_failed(self, alert: Any) -> None:
        if alert.error.value() in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"cannot write {alert.filename()}: the disk is full; free some space, or move the store")
        self._misread = f"{alert.filename()} cannot be used: {alert.error.message()}"
