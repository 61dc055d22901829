"""BitTorrent's tracker protocol over HTTP (BEP 3, 7, 23, 48) for the swarms of published artifacts.

``GET /announce/KEY?info_hash=…`` and ``GET /scrape/KEY?info_hash=…``. The key follows from the join token, because
BitTorrent clients send no header. What cannot be answered gets status 200 and a bencoded ``failure reason``, as the
protocol has it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from urllib.parse import unquote_to_bytes

import libtorrent

from meshnet.errors import NotAuthorized, RequestError, UnknownArtifact
from meshnet.tracker.artifacts import SHORT_HASH_BYTES, Artifacts
from meshnet.tracker.auth import announce_key, announce_key_is
from meshnet.tracker.client import base_url
from meshnet.tracker.peers import Endpoint, Peers
from meshnet.tracker.settings import TrackerSettings

#: libtorrent sends some 20.
MAX_PARAMETERS = 100
DEFAULT_WANTED = 50
MAX_WANTED = 200
#: Addresses of one peer.
MAX_ADDRESSES = 8
PEER_ID_BYTES = 20

#: What bencode takes.
Entry = dict[bytes, Any]


@dataclass(frozen=True)
class Announce:
    """One announce, well-formed."""

    swarm: bytes
    peer_id: bytes
    endpoints: tuple[Endpoint, ...]
    complete: bool
    event: str
    n_wanted: int

    @classmethod
    def parse(cls, query: bytes, connected_from: str | None) -> Announce:
        """Read the raw query string of a peer that is connected from this address.

        Raises:
            RequestError: malformed; the message names the parameter.
        """
        given = _parameters(query)
        swarm = _exactly(given, b"info_hash", SHORT_HASH_BYTES)
        peer_id = _exactly(given, b"peer_id", PEER_ID_BYTES)
        port = _number(given, b"port")
        if port is None or not 0 < port < 65536:
            raise RequestError("port is not that of a peer; give 1 to 65535", param="port")
        n_wanted = _number(given, b"numwant")
        return cls(
            swarm=swarm,
            peer_id=peer_id,
            endpoints=tuple(Endpoint(address, port) for address in _addresses(given, connected_from)),
            complete=_number(given, b"left") == 0,
            # Others, as "paused" of BEP 21, tell of a peer that goes on.
            event=_first(given, b"event").decode("ascii", "replace"),
            n_wanted=DEFAULT_WANTED if n_wanted is None or n_wanted < 0 else min(n_wanted, MAX_WANTED),
        )


class AnnounceFace:
    """Answers announces and scrapes, in bytes. What cannot be answered gets a ``failure reason``."""

    def __init__(self, artifacts: Artifacts, peers: Peers, settings: TrackerSettings, join_token: str) -> None:
        self._artifacts = artifacts
        self._peers = peers
        self._join_token = join_token
        self._interval_s = max(1, round(settings.announce_interval_s))
        self._min_interval_s = max(1, round(settings.announce_min_interval_s))

    def announce(self, key: str, query: bytes, connected_from: str | None) -> bytes:
        return self._answer(key, lambda: self._announce(Announce.parse(query, connected_from)))

    def scrape(self, key: str, query: bytes) -> bytes:
        return self._answer(key, lambda: self._scrape(_parameters(query).get(b"info_hash", [])))

    def _answer(self, key: str, answer: Callable[[], Entry]) -> bytes:
        try:
            if not announce_key_is(key, self._join_token):
                raise NotAuthorized("wrong announce key: it follows from the join token, take that of this tracker")
            told = answer()
        except (NotAuthorized, RequestError) as error:
            told = {
                b"failure reason": str(error).encode(),
                # Without these, libtorrent asks again after half an hour.
                b"interval": self._min_interval_s,
                b"min interval": self._min_interval_s,
            }
        return bytes(libtorrent.bencode(told))

    def _announce(self, told: Announce) -> Entry:
        if not self._artifacts.has_swarm(told.swarm):
            raise UnknownArtifact(
                f"no artifact with info hash {told.swarm.hex()} is published here; publish it first "
                "(`meshnet artifact publish`)"
            )
        others: tuple[Endpoint, ...] = ()
        if told.event == "stopped":
            self._peers.leave(told.swarm, told.peer_id)
        else:
            others = self._peers.join(
                told.swarm,
                told.peer_id,
                told.endpoints,
                complete=told.complete,
                just_completed=told.event == "completed",
                n_wanted=told.n_wanted,
            )
        count = self._peers.count(told.swarm)
        return {
            b"complete": count.complete,
            b"incomplete": count.peers - count.complete,
            b"interval": self._interval_s,
            b"min interval": self._min_interval_s,
            b"peers": _compact(others, 4),
            b"peers6": _compact(others, 6),
        }

    def _scrape(self, wanted: Sequence[bytes]) -> Entry:
        if not wanted or any(len(swarm) != SHORT_HASH_BYTES for swarm in wanted):
            raise RequestError(f"info_hash is missing or not {SHORT_HASH_BYTES} bytes long", param="info_hash")
        counts = {swarm: self._peers.count(swarm) for swarm in wanted if self._artifacts.has_swarm(swarm)}
        return {
            b"files": {
                swarm: {
                    b"complete": count.complete,
                    b"downloaded": count.completed,
                    b"incomplete": count.peers - count.complete,
                }
                for swarm, count in counts.items()
            }
        }


def announce_url(tracker_url: str, join_token: str) -> str:
    """Where the peers of all swarms announce themselves. It holds a key, which is as secret as the token.

    Raises:
        UsageError: not the URL of a tracker.
    """
    return f"{base_url(tracker_url)}/announce/{announce_key(join_token)}"


def _parameters(query: bytes) -> dict[bytes, list[bytes]]:
    # By hand, because the usual parsers make text of what is bytes here, and spaces of plus signs.
    pairs = [pair for pair in query.split(b"&", MAX_PARAMETERS + 1) if pair]
    if len(pairs) > MAX_PARAMETERS:
        raise RequestError(f"there are more than {MAX_PARAMETERS} parameters")
    given: dict[bytes, list[bytes]] = {}
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        given.setdefault(name, []).append(unquote_to_bytes(value))
    return given


def _first(given: dict[bytes, list[bytes]], name: bytes) -> bytes:
    return given.get(name, [b""])[0]


def _exactly(given: dict[bytes, list[bytes]], name: bytes, n_bytes: int) -> bytes:
    value = _first(given, name)
    if len(value) != n_bytes:
        raise RequestError(f"{name.decode()} is not {n_bytes} bytes long but {len(value)}", param=name.decode())
    return value


def _number(given: dict[bytes, list[bytes]], name: bytes) -> int | None:
    text = _first(given, name)
    if not text:
        return None
    if not re.fullmatch(rb"-?[0-9]{1,19}", text):
        raise RequestError(f"{name.decode()} is not a number", param=name.decode())
    return int(text)


def _addresses(given: dict[bytes, list[bytes]], connected_from: str | None) -> Iterable[IPv4Address | IPv6Address]:
    """Where the peer can be reached: as it says itself, else where its connection comes from; and further ones."""
    main = _usable(_first(given, b"ip")) or _usable((connected_from or "").encode())
    further = [_usable(text) for text in (*given.get(b"ipv4", []), *given.get(b"ipv6", []))]
    # Once each, in this order.
    found = list(dict.fromkeys(address for address in (main, *further) if address is not None))
    if not found:
        raise RequestError("the peer's address cannot be told from its connection; give it as ip", param="ip")
    return found[:MAX_ADDRESSES]


def _usable(text: bytes) -> IPv4Address | IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.decode("ascii"))
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_unspecified or address.is_multicast:
        return None
    # A link's own addresses mean nothing without the link.
    return None if address.version == 6 and address.is_link_local else address


def _compact(endpoints: Iterable[Endpoint], version: int) -> bytes:
    return b"".join(
        endpoint.address.packed + endpoint.port.to_bytes(2, "big")
        for endpoint in endpoints
        if endpoint.address.version == version
    )
