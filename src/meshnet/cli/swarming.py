"""Options of the commands that take part in a swarm."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from meshnet.errors import UsageError

if TYPE_CHECKING:
    from meshnet.artifact.swarm import SwarmOptions
    from meshnet.node.address import Endpoint

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def swarm_options(
    endpoint: Endpoint, listen: str | None, upload_limit: str | None, download_limit: str | None
) -> SwarmOptions:
    """Where to listen and how fast to go, as told on the command line.

    Raises:
        UsageError: an address or a rate is malformed.
    """
    from meshnet.artifact.swarm import SwarmOptions
    from meshnet.node.address import split_address

    host, port = split_address(listen, what="--swarm-listen") if listen else (endpoint.listen.rpartition(":")[0], 0)
    return SwarmOptions(
        listen=f"{host}:{port}",
        announce_host=_ip_address(endpoint.advertise_host.strip("[]")),
        upload_limit_bytes_per_s=_rate(upload_limit, "--upload-limit"),
        download_limit_bytes_per_s=_rate(download_limit, "--download-limit"),
    )


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
    if rate < 1000:
        raise UsageError(f"{what} {text!r} is no rate; write bytes per second, for example 2MB")
    return rate
