"""How a machine takes part in swarms, in our words and in libtorrent's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import libtorrent


@dataclass(frozen=True)
class SwarmOptions:
    """How this machine takes part. ``announce_host`` is what others are told to connect to, if the tracker would see
    another address; limits of 0 are none; with ``map_ports`` the router is asked to forward the port. Peers are never
    looked for beyond the tracker: torrents are private."""

    listen: str = "0.0.0.0:0"
    announce_host: str | None = None
    upload_limit_bytes_per_s: int = 0
    download_limit_bytes_per_s: int = 0
    map_ports: bool = False


def session_settings(options: SwarmOptions) -> Any:
    """Settings of a libtorrent session."""
    category = libtorrent.alert.category_t
    return {
        "listen_interfaces": options.listen,
        # The port that was asked for or none: firewalls know it.
        "max_retry_port_bind": 0,
        "listen_system_port_fallback": False,
        "announce_ip": options.announce_host or "",
        "user_agent": "Meshnet",
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": options.map_ports,
        "enable_natpmp": options.map_ports,
        # Several machines behind one address, and several nodes on one machine, are the usual case here.
        "allow_multiple_connections_per_ip": True,
        # Made to give way to everything else, which is slow where nothing else is going on.
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        # What is on its way from one peer is asked of others too when nothing else is left, and then arrives twice: no
        # more than 2 MB per peer, or a second's worth. Several may send parts of a piece, so that it is soon passed on.
        "max_allowed_in_request_queue": 128,
        "request_queue_time": 1,
        "whole_pieces_threshold": 0,
        "min_reconnect_time": 2,
        # Whoever has all that it wants may want more a moment later: the rest after the headers, another range.
        "close_redundant_connections": False,
        "min_announce_interval": 15,
        "stop_tracker_timeout": 1,
        "ban_web_seeds": True,
        # A web server that was down is asked again after so many seconds.
        "urlseed_wait_retry": 10,
        "alert_queue_size": 10_000,
        "alert_mask": (
            category.error_notification
            | category.status_notification
            | category.storage_notification
            | category.tracker_notification
            | category.peer_notification
        ),
    }
