"""Where a worker listens, and under which address its neighbours and the gateway reach it."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from meshnet.errors import UsageError

WILDCARDS = ("0.0.0.0", "[::]")


@dataclass(frozen=True)
class Endpoint:
    """``listen`` is HOST:PORT, port 0 for any free one. ``advertise_port`` None means the port listened on."""

    listen: str
    advertise_host: str
    advertise_port: int | None = None

    def advertised(self, bound: str) -> str:
        """The address to tell others, once the worker says where it is ``bound``."""
        _, port = split_address(bound, what="the worker's address")
        return f"{self.advertise_host}:{self.advertise_port or port}"


def choose_endpoint(tracker_url: str, *, listen: str | None = None, advertise: str | None = None) -> Endpoint:
    """Decide both addresses.

    Without ``listen``: loopback if the tracker is on loopback, else the local address that reaches the tracker, any
    free port. Without ``advertise``: the address listened on, or for a wildcard the one that reaches the tracker.
    ``advertise`` is HOST or HOST:PORT, for a port forwarded from elsewhere.

    Raises:
        UsageError: an address is malformed, or the tracker's host is unknown or unreachable.
    """
    if listen is not None:
        host, port = split_address(listen, what="--listen")
    else:
        host, port = local_address_towards(tracker_url), 0
    if advertise is not None:
        if advertise.rpartition(":")[0] in WILDCARDS or advertise in WILDCARDS:
            raise UsageError(f"--advertise {advertise} is no address that others could call; name this machine's own")
        if re.search(r"[^:]:[0-9]+$", advertise):
            advertise_host, advertise_port = split_address(advertise, what="--advertise")
            if not advertise_port:
                raise UsageError(f"--advertise {advertise} has port 0; name the port that others reach")
            return Endpoint(f"{host}:{port}", advertise_host, advertise_port)
        try:
            advertise_host, _ = split_address(f"{advertise}:0", what="--advertise")
        except UsageError:
            raise UsageError(
                f"--advertise {advertise!r} is neither HOST nor HOST:PORT, for example 192.0.2.7:7000 "
                "(an IPv6 address in brackets)"
            ) from None
        return Endpoint(f"{host}:{port}", advertise_host)
    return Endpoint(f"{host}:{port}", local_address_towards(tracker_url) if host in WILDCARDS else host)


def split_address(address: str, *, what: str) -> tuple[str, int]:
    """``HOST:PORT`` in two; an IPv6 host keeps its brackets.

    Raises:
        UsageError: it is not of that form.
    """
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", address)
    if not match or int(match[2]) > 65535:
        raise UsageError(f"{what} {address!r} is not HOST:PORT, for example 192.0.2.7:7000")
    return match[1], int(match[2])


def local_address_towards(tracker_url: str) -> str:
    """The address of this machine that packets to the tracker leave from. Sends nothing.

    Raises:
        UsageError: the tracker's host is unknown or unreachable.
    """
    parts = urlsplit(tracker_url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            found = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except OSError as error:
        raise UsageError(
            f"cannot tell which local address reaches the tracker {host} ({error.strerror}); "
            "check --tracker, or pass --listen HOST:PORT"
        ) from error
    return f"[{found}]" if found.version == 6 else str(found)


def free_port(host: str) -> int:
    """A port of ``host`` (a wildcard: of every address) that nobody listens on now. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])
