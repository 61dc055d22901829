"""Where an artifact's bytes come from, and who of them failed: told by libtorrent, kept for people to see."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any
from urllib.parse import urlsplit

import libtorrent

log = logging.getLogger(__name__)

Address = tuple[str, int]

MAX_PROBLEMS = 50
WRONG_BYTES = "banned: it sent wrong bytes"
#: libtorrent's number for it.
_PEER_BANNED = 91


class Sources:
    """Peers and web seeds of one artifact, as far as anything is to be said of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        #: Web seeds that are of use.
        self.web_seeds: tuple[str, ...] = ()
        #: True if a server that a web seed had sent us on to does not do any more.
        self.lost_redirect = False
        self._banned_peers: dict[Address, None] = {}
        self._banned_web_seeds: set[str] = set()
        self._banned_web_addresses: set[str] = set()
        self._problems: dict[str, str] = {}
        self._web_problems: dict[str, str] = {}
        self._wrong_pieces = 0

    @property
    def banned_peers(self) -> list[Address]:
        return list(self._banned_peers)

    @property
    def problems(self) -> dict[str, str]:
        """Who failed us and how, by address or URL; the tracker under its URL."""
        return {**self._web_problems, **self._problems}

    def offer(self, web_seeds: Sequence[str], problems: Mapping[str, str]) -> None:
        """Take note of web seeds that were found usable just now, and of what is wrong with others."""
        for url, what in problems.items():
            if self._web_problems.get(url) != what:
                log.warning("web seed of %s: %s", self._name, what)
        self.web_seeds = tuple(url for url in web_seeds if url not in self._banned_web_seeds)
        self._web_problems = dict(problems)
        self.lost_redirect = False

    def waiting(self, starts: Iterable[int], missing: Set[int]) -> Set[int]:
        """The missing pieces that must not be asked for yet; ``starts`` are all files' first pieces but one.

        libtorrent asks web seeds for many pieces at once, and mistakes what follows on the end of a file: so the last
        piece of a file waits for the first of the next one.
        """
        if not self.web_seeds:
            return frozenset()
        return {start - 1 for start in starts if start in missing and start - 1 in missing}

    def hear(self, alert: Any) -> None:
        """Take note of what libtorrent tells."""
        if isinstance(alert, libtorrent.hash_failed_alert):
            self._wrong_pieces += 1
            if self._wrong_pieces & (self._wrong_pieces - 1) == 0:
                log.warning("%s: %d pieces arrived wrong so far and are fetched again", self._name, self._wrong_pieces)
        elif isinstance(alert, libtorrent.peer_ban_alert):
            host, port = alert.endpoint
            self._banned_peers[str(host), int(port)] = None
            if shown_address(alert.endpoint) not in self._banned_web_addresses:
                self._problem(shown_address(alert.endpoint), WRONG_BYTES)
        elif isinstance(alert, libtorrent.url_seed_alert):
            self._hear_of_web_seed(alert)
        elif isinstance(alert, libtorrent.tracker_error_alert):
            self._problem(_shown_url(alert.url), alert.error_message() or alert.error.message())
        elif isinstance(alert, libtorrent.tracker_reply_alert):
            self._problems.pop(_shown_url(alert.url), None)

    def _hear_of_web_seed(self, alert: Any) -> None:
        url = alert.server_url()
        if alert.error.value() == _PEER_BANNED:
            self._banned_web_seeds.add(url)
            self.web_seeds = tuple(one for one in self.web_seeds if one != url)
            # Once is enough: it is told by its address too, before or after.
            parts = urlsplit(url)
            address = f"{parts.hostname}:{parts.port}"
            self._banned_web_addresses.add(address)
            self._problems.pop(address, None)
            self._problem(url, WRONG_BYTES)
            return
        if url not in self.web_seeds:
            self.lost_redirect = True
        self._web_problems[url] = alert.error_message() or alert.error.message()

    def _problem(self, source: str, what: str) -> None:
        if source not in self._problems and len(self._problems) >= MAX_PROBLEMS:
            return
        if self._problems.get(source) != what:
            log.warning("swarm of %s: %s: %s", self._name, source, what)
        self._problems[source] = what


def shown_address(address: Address) -> str:
    """Host and port as people write them."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _shown_url(url: str) -> str:
    # The last part of an announce URL is a key.
    return url.rpartition("/")[0] or url
