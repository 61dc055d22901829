"""One artifact's swarm, by libtorrent: fetches the wanted pieces from peers and web seeds, and serves what is there.

Not public in any way unless asked for: no DHT, no local discovery, no port mapping. Peers come from the Meshnet
tracker. What libtorrent calls a finished piece is read back and recorded by the `Writer` before it counts here.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libtorrent

from meshnet.artifact.stored import Writer
from meshnet.errors import ArtifactError, StoreError

log = logging.getLogger(__name__)

#: Finished pieces are read back and recorded this often.
CONFIRM_EVERY_S = 1.0
#: A piece that libtorrent has finished and that cannot be read back for so long is fetched again.
READ_BACK_LIMIT_S = 20.0
#: Peers and web seeds that failed, as kept for people to see.
MAX_PROBLEMS = 50
_WANTED, _UNWANTED = 4, 0


@dataclass(frozen=True)
class SwarmOptions:
    """How this machine takes part. ``announce_host`` is what others are told to connect to, if the tracker would see
    another address; limits of 0 are none; ``public`` lets libtorrent look for peers beyond the tracker."""

    listen: str = "0.0.0.0:0"
    announce_host: str | None = None
    upload_limit_bytes_per_s: int = 0
    download_limit_bytes_per_s: int = 0
    public: bool = False


@dataclass(frozen=True)
class SwarmState:
    """What is going on. Payload counts since the start, without protocol overhead; rates are bytes per second."""

    peers: int = 0
    web_seeds: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0
    wasted_bytes: int = 0
    download_rate: int = 0
    upload_rate: int = 0
    #: Who failed us and how, by address or URL; the tracker under its URL.
    problems: dict[str, str] = field(default_factory=dict)


class Swarm:
    """Membership in the swarm of one artifact, with a port of its own. Not for several threads at once."""

    def __init__(
        self, writer: Writer, options: SwarmOptions, *, trackers: Sequence[str] = (), web_seeds: Sequence[str] = ()
    ) -> None:
        self._writer = writer
        self._bundle = writer.stored.bundle
        self._options = options
        self._trackers = list(trackers)
        self._web_seeds = list(web_seeds)
        self._wanted: frozenset[int] = frozenset()
        self._finished_at: dict[int, float] = {}
        self._confirmed_at = 0.0
        self._problems: dict[str, str] = {}
        self._session = libtorrent.session(_settings(options))
        self._before = (0, 0, 0)
        self._handle = self._add()

    @property
    def port(self) -> int:
        """Where peers connect to."""
        return int(self._session.listen_port())

    def connect(self, host: str, port: int) -> None:
        """Try a peer that no tracker told of."""
        self._handle.connect_peer((host, port))

    def want(self, pieces: Iterable[int]) -> None:
        """Fetch these pieces, and no others."""
        wanted = frozenset(pieces)
        if wanted != self._wanted:
            self._wanted = wanted
            self._handle.prioritize_pieces(self._priorities())

    def step(self, wait_s: float) -> SwarmState:
        """Wait a moment, look at what happened, record what arrived.

        Raises:
            StoreError: the disk is full or failed.
            ArtifactError: libtorrent gave up on the torrent.
        """
        self._session.wait_for_alert(int(wait_s * 1000))
        for alert in self._session.pop_alerts():
            self._look_at(alert)
        status = self._handle.status(libtorrent.status_flags_t.query_pieces)
        self._confirm(status)
        return self._state(status)

    def refetch(self, pieces: Iterable[int]) -> None:
        """Take pieces off the record and fetch them again."""
        self._writer.forget(pieces)
        status = self._handle.status()
        down, up, wasted = self._before
        self._before = (
            down + status.total_payload_download,
            up + status.total_payload_upload,
            wasted + status.total_failed_bytes + status.total_redundant_bytes,
        )
        # libtorrent takes back no piece; it has to be told anew what is there.
        self._session.remove_torrent(self._handle)
        self._handle = self._add()

    def close(self) -> None:
        """Leave, and record what arrived last."""
        status = self._handle.status(libtorrent.status_flags_t.query_pieces)
        self._session.pause()
        self._confirm(status, now=True)

    # ------------------------------------------------------------------------------------------------ details

    def _add(self) -> Any:
        stored = self._writer.stored
        parameters = libtorrent.add_torrent_params()
        parameters.ti = libtorrent.torrent_info(self._bundle.torrent)
        parameters.flags = libtorrent.torrent_flags.update_subscribe
        if stored.links is not None:
            parameters.flags |= libtorrent.torrent_flags.upload_mode
        parameters.save_path = str(stored.directory)
        # Ours are under files/, whatever the torrent is called; links are somewhere else altogether.
        parameters.renamed_files = {number: str(path) for number, path in enumerate(stored.paths)}
        verified = self._writer.verified
        parameters.have_pieces = [piece in verified for piece in range(len(self._bundle.pieces))]
        parameters.piece_priorities = self._priorities()
        parameters.trackers = self._trackers
        parameters.url_seeds = self._web_seeds
        parameters.storage_mode = libtorrent.storage_mode_t.storage_mode_sparse
        self._finished_at = {}
        handle = self._session.add_torrent(parameters)
        handle.set_upload_limit(self._options.upload_limit_bytes_per_s)
        handle.set_download_limit(self._options.download_limit_bytes_per_s)
        return handle

    def _priorities(self) -> list[int]:
        return [_WANTED if piece in self._wanted else _UNWANTED for piece in range(len(self._bundle.pieces))]

    def _confirm(self, status: Any, *, now: bool = False) -> None:
        time_s = time.monotonic()
        verified = self._writer.verified
        finished = [piece for piece, there in enumerate(status.pieces) if there and piece not in verified]
        for piece in finished:
            self._finished_at.setdefault(piece, time_s)
        complete = finished and self._wanted <= verified.union(finished)
        if not finished or not (now or complete or time_s - self._confirmed_at >= CONFIRM_EVERY_S):
            return
        self._confirmed_at = time_s
        self._writer.confirm(finished)
        for piece in self._writer.verified.intersection(self._finished_at):
            del self._finished_at[piece]
        lost = [piece for piece, at in self._finished_at.items() if time_s - at > READ_BACK_LIMIT_S]
        if lost:
            log.error("%s; fetching it again", self._writer.stored.damage(lost[0]))
            self.refetch(lost)

    def _state(self, status: Any) -> SwarmState:
        down, up, wasted = self._before
        peers = [peer for peer in self._handle.get_peer_info() if peer.connection_type == peer.standard_bittorrent]
        return SwarmState(
            peers=len(peers),
            web_seeds=len(self._web_seeds),
            downloaded_bytes=down + status.total_payload_download,
            uploaded_bytes=up + status.total_payload_upload,
            wasted_bytes=wasted + status.total_failed_bytes + status.total_redundant_bytes,
            download_rate=status.download_payload_rate,
            upload_rate=status.upload_payload_rate,
            problems=dict(self._problems),
        )

    def _look_at(self, alert: Any) -> None:
        if isinstance(alert, libtorrent.file_error_alert):
            full = alert.error.value() in (errno.ENOSPC, errno.EDQUOT)
            cause = "the disk is full" if full else alert.error.message()
            raise StoreError(f"cannot write {alert.filename()}: {cause}; free some space, or move the store")
        if isinstance(alert, libtorrent.torrent_error_alert):
            raise ArtifactError(f"the swarm of {self._bundle.manifest.name} failed: {alert.error.message()}")
        if isinstance(alert, libtorrent.hash_failed_alert):
            log.warning(
                "piece %d of %s arrived wrong; fetching it again", alert.piece_index, self._bundle.manifest.name
            )
        elif isinstance(alert, libtorrent.peer_ban_alert):
            self._problem(_endpoint(alert), "banned: it sent wrong bytes")
        elif isinstance(alert, libtorrent.url_seed_alert):
            self._problem(alert.server_url(), alert.error_message() or alert.error.message())
        elif isinstance(alert, libtorrent.tracker_error_alert):
            self._problem(_shown(alert.url), alert.error_message() or alert.error.message())
        elif isinstance(alert, libtorrent.tracker_reply_alert):
            self._problems.pop(_shown(alert.url), None)

    def _problem(self, source: str, what: str) -> None:
        if self._problems.get(source) != what:
            log.warning("swarm of %s: %s: %s", self._bundle.manifest.name, source, what)
        if source in self._problems or len(self._problems) < MAX_PROBLEMS:
            self._problems[source] = what


def _settings(options: SwarmOptions) -> Any:
    category = libtorrent.alert.category_t
    return {
        "listen_interfaces": options.listen,
        "announce_ip": options.announce_host or "",
        "user_agent": "Meshnet",
        "enable_dht": options.public,
        "enable_lsd": options.public,
        "enable_upnp": options.public,
        "enable_natpmp": options.public,
        # Several machines behind one address, and several nodes on one machine, are the usual case here.
        "allow_multiple_connections_per_ip": True,
        # Made to give way to everything else, which is slow where nothing else is going on.
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        "min_reconnect_time": 2,
        # Whoever has all that it wants may want more a moment later: another range, a damaged piece.
        "close_redundant_connections": False,
        "min_announce_interval": 15,
        "stop_tracker_timeout": 1,
        "ban_web_seeds": True,
        "alert_queue_size": 10_000,
        "alert_mask": (
            category.error_notification
            | category.status_notification
            | category.storage_notification
            | category.tracker_notification
            | category.peer_notification
        ),
    }


def _endpoint(alert: Any) -> str:
    host, port = alert.endpoint
    return f"{host}:{port}"


def _shown(url: str) -> str:
    # The last part of an announce URL is a key.
    return url.rpartition("/")[0] or url
