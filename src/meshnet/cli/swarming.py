"""Options of the commands that take part in a swarm."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from meshnet.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from meshnet.artifact.manifest import Manifest
    from meshnet.artifact.swarm import SwarmOptions
    from meshnet.node.address import Endpoint

_WEB_SEED = re.compile(r"https?://[!-\x22$->@-~]+/")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
#: Slower than a block of 16 KiB in as many seconds, peers take each other for dead.
_MIN_RATE = 1000


def swarm_options(
    endpoint: Endpoint,
    listen: str | None,
    upload_limit: str | None,
    download_limit: str | None,
    *,
    map_ports: bool = False,
) -> SwarmOptions:
    """Where to listen and how fast to go, as told on the command line.

    Raises:
        UsageError: an address or a rate is malformed.
    """
    from meshnet.artifact.swarm import SwarmOptions
    from meshnet.node.address import WILDCARDS, free_port, split_address

    host, port = split_address(listen, what="--swarm-listen") if listen else (endpoint.listen.rpartition(":")[0], 0)
    if host in WILDCARDS and not port:
        # The same on every interface: libtorrent would take another for each, and only one can be announced.
        port = free_port(host)
    return SwarmOptions(
        listen=f"{host}:{port}",
        announce_host=_ip_address(endpoint.advertise_host.strip("[]")),
        upload_limit_bytes_per_s=_rate(upload_limit, "--upload-limit"),
        download_limit_bytes_per_s=_rate(download_limit, "--download-limit"),
        map_ports=map_ports,
    )


def web_seed_base(manifest: Manifest, url: str) -> str:
    """What a torrent client needs to know of a web server, from the URL of an artifact's first file there.

    Raises:
        ArtifactError: it is no such URL.
    """
    place = f"{manifest.directory}/{manifest.file_names[0]}" if manifest.directory else manifest.file_names[0]
    # Without its query, which BitTorrent cannot send: as when a manifest is made.
    plain = url.partition("#")[0].partition("?")[0]
    base = plain.removesuffix(place)
    if base == plain or not _WEB_SEED.fullmatch(base):
        raise ArtifactError(
            f"web seed {url!r} is not http(s)://HOST/…/{place}: there the files must be called as in the manifest"
        )
    return base


def _ip_address(host: str) -> str | None:
    # Announces carry addresses only; for a name the tracker takes the address that it sees.
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _rate(text: str | None, what: str) -> int:
    if text is None:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?(?:/s)?", text.strip(), re.IGNORECASE)
    rate = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if rate < _MIN_RATE:
        raise UsageError(f"{what} {text!r} is no rate; write bytes per second, at least 1kB, for example 2MB")
    return rate
