"""BitTorrent's tracker protocol, in bytes."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any
from urllib.parse import quote_from_bytes

import libtorrent
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshnet.errors import RequestError, UsageError
from meshnet.tracker.announce import (
    MAX_ADDRESSES,
    MAX_PARAMETERS,
    MAX_WANTED,
    Announce,
    AnnounceFace,
    announce_url,
)
from meshnet.tracker.artifacts import Artifacts
from meshnet.tracker.auth import announce_key, announce_key_is
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.peers import Peers
from meshnet.tracker.settings import TrackerSettings
from tests.support.published import small_bundle

#: Every kind of byte that is special in a query string, and those that are no text.
HASH = bytes([0, 255, 10, 13, 32, 34, 35, 37, 38, 43, 47, 59, 61, 63, 92, 128, 195, 40, 65, 97])
PEER_ID = b"-LT2100-&=%+\x00\xff\xfe;#?/ "[:20]
TOKEN = "join-0123456789"
KEY = announce_key(TOKEN)
HERE = "192.0.2.1"


def query(**given: Any) -> bytes:
    """A query string; bytes are percent-encoded as clients do, lists given several times, None left out."""
    pairs: list[bytes] = []
    for name, value in {"info_hash": HASH, "peer_id": PEER_ID, "port": 6881, "left": 100, **given}.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            data = one if isinstance(one, bytes) else str(one).encode()
            pairs.append(b"%b=%b" % (name.encode(), quote_from_bytes(data, safe="").encode()))
    return b"&".join(pairs)


def addresses(told: Announce) -> list[str]:
    return [str(endpoint.address) for endpoint in told.endpoints]


def test_raw_bytes_arrive_as_they_were_sent() -> None:
    told = Announce.parse(query(), HERE)
    assert (told.swarm, told.peer_id) == (HASH, PEER_ID)
    assert [(str(e.address), e.port) for e in told.endpoints] == [(HERE, 6881)]
    # Bytes that need no escape, a plus that is a plus, and lower-case escapes.
    plain = b"info_hash=+" + b"%c3" * 19 + b"&peer_id=" + b"x" * 20 + b"&port=1&left=0&&supportcrypto"
    told = Announce.parse(plain, HERE)
    assert told.swarm == b"+" + b"\xc3" * 19
    assert told.complete


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"info_hash": None}, "info_hash is not 20 bytes long but 0"),
        ({"info_hash": HASH[:19]}, "info_hash is not 20 bytes long but 19"),
        ({"info_hash": HASH + b"x" * 12}, "info_hash is not 20 bytes long but 32"),
        ({"peer_id": b"x" * 21}, "peer_id is not 20 bytes long but 21"),
        ({"port": None}, "port is not that of a peer"),
        ({"port": 0}, "port is not that of a peer"),
        ({"port": 65536}, "port is not that of a peer"),
        ({"port": -1}, "port is not that of a peer"),
        ({"port": "http"}, "port is not a number"),
        ({"port": "\u0661"}, "port is not a number"),
        ({"left": "many"}, "left is not a number"),
        ({"left": "9" * 20}, "left is not a number"),
        ({"numwant": "1e3"}, "numwant is not a number"),
        ({"x": ["y"] * MAX_PARAMETERS}, f"more than {MAX_PARAMETERS} parameters"),
    ],
)
def test_malformed_announces_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        Announce.parse(query(**given), HERE)


@pytest.mark.parametrize(
    ("left", "complete"), [(0, True), (1, False), (2**62, False), (None, False), (-1, False), ("", False)]
)
def test_who_is_complete(left: Any, complete: bool) -> None:
    assert Announce.parse(query(left=left), HERE).complete is complete


@pytest.mark.parametrize(
    ("numwant", "n_wanted"), [(None, 50), (-1, 50), (0, 0), (7, 7), (200, 200), (201, MAX_WANTED), (10**18, MAX_WANTED)]
)
def test_how_many_are_wanted(numwant: Any, n_wanted: int) -> None:
    assert Announce.parse(query(numwant=numwant), HERE).n_wanted == n_wanted


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [HERE]),
        ({"ip": "198.51.100.7"}, ["198.51.100.7"]),
        ({"ip": "2001:db8::7"}, ["2001:db8::7"]),
        ({"ip": "::ffff:198.51.100.7"}, ["198.51.100.7"]),
        ({"ip": "node7.example"}, [HERE]),
        ({"ip": b"\xff\x00"}, [HERE]),
        ({"ip": "0.0.0.0"}, [HERE]),
        ({"ip": "224.0.0.1"}, [HERE]),
        ({"ip": "fe80::1%eth0"}, [HERE]),
        ({"ip": "1.2.3.4:80"}, [HERE]),
        ({"ipv6": "2001:db8::7"}, [HERE, "2001:db8::7"]),
        ({"ipv4": HERE, "ipv6": ["2001:db8::7", "2001:db8::8", "::", "x"]}, [HERE, "2001:db8::7", "2001:db8::8"]),
        ({"ip": "198.51.100.7", "ipv4": "203.0.113.5"}, ["198.51.100.7", "203.0.113.5"]),
    ],
)
def test_where_a_peer_is(given: dict[str, Any], expected: list[str]) -> None:
    assert addresses(Announce.parse(query(**given), HERE)) == expected


def test_addresses_are_bounded_and_needed() -> None:
    many = [f"198.51.100.{number}" for number in range(50)]
    assert addresses(Announce.parse(query(ipv4=many), HERE)) == [HERE, *many[: MAX_ADDRESSES - 1]]
    for nowhere in (None, "testclient", "fe80::1%eth0"):
        with pytest.raises(RequestError, match="give it as ip"):
            Announce.parse(query(), nowhere)
        assert addresses(Announce.parse(query(ip=HERE), nowhere)) == [HERE]
    assert addresses(Announce.parse(query(), "::ffff:192.0.2.1")) == [HERE]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifacts, bytes]:
    directory = tmp_path_factory.mktemp("published")
    bundle = small_bundle(directory)

    async def publish() -> Artifacts:
        database = await Database.open(sqlite_url(directory / "t.sqlite3"))
        try:
            artifacts = Artifacts(database)
            await artifacts.publish(bundle)
        finally:
            await database.close()
        return artifacts

    return asyncio.run(publish()), bytes.fromhex(bundle.info_hash)[:20]


@pytest.fixture
def swarm(published: tuple[Artifacts, bytes]) -> bytes:
    return published[1]


@pytest.fixture
def face(published: tuple[Artifacts, bytes]) -> AnnounceFace:
    return AnnounceFace(published[0], Peers(150.0), TrackerSettings(), TOKEN)


def announced(face: AnnounceFace, swarm: bytes, number: int, **given: Any) -> Any:
    sent = query(info_hash=swarm, peer_id=b"%020d" % number, port=7000 + number, **given)
    return libtorrent.bdecode(face.announce(KEY, sent, HERE))


def test_an_answer(face: AnnounceFace, swarm: bytes) -> None:
    assert announced(face, swarm, 1, event="started", left=0) == {
        b"complete": 1,
        b"incomplete": 0,
        b"interval": 60,
        b"min interval": 15,
        b"peers": b"",
        b"peers6": b"",
    }
    announced(face, swarm, 2, ip="2001:db8::2", event="started")
    answer = announced(face, swarm, 3, compact=0, no_peer_id=1)
    assert (answer[b"complete"], answer[b"incomplete"]) == (1, 2)
    assert answer[b"peers"] == ipaddress.ip_address(HERE).packed + (7001).to_bytes(2, "big")
    assert answer[b"peers6"] == ipaddress.ip_address("2001:db8::2").packed + (7002).to_bytes(2, "big")


def test_events(face: AnnounceFace, swarm: bytes) -> None:
    announced(face, swarm, 1, event="started")
    # BEP 21: a peer that has all it wants, but not everything.
    assert announced(face, swarm, 1, event="paused")[b"incomplete"] == 1
    assert announced(face, swarm, 2)[b"peers"] != b""
    answer = announced(face, swarm, 1, event="completed", left=0)
    assert (answer[b"complete"], answer[b"incomplete"]) == (1, 1)
    answer = announced(face, swarm, 1, event="stopped", left=0)
    assert (answer[b"complete"], answer[b"incomplete"], answer[b"peers"]) == (0, 1, b"")
    assert announced(face, swarm, 2)[b"peers"] == b""


def test_only_what_is_published_has_a_swarm(face: AnnounceFace, swarm: bytes) -> None:
    answer = refused(face.announce(KEY, query(), HERE))
    assert f"no artifact with info hash {HASH.hex()} is published here; publish it first" in answer


def refused(answer: bytes) -> str:
    told: Any = libtorrent.bdecode(answer)
    # With an interval, or libtorrent would come back after half an hour.
    assert set(told) == {b"failure reason", b"interval", b"min interval"}
    assert (told[b"interval"], told[b"min interval"]) == (15, 15)
    return str(told[b"failure reason"].decode())


def test_a_wrong_key_is_told_in_the_protocol(face: AnnounceFace, swarm: bytes) -> None:
    for key in ("", KEY[:-1], "é" * 32, TOKEN):
        assert "wrong announce key" in refused(face.announce(key, query(info_hash=swarm), HERE))
        assert "wrong announce key" in refused(face.scrape(key, query(info_hash=swarm)))


def test_scrape(face: AnnounceFace, swarm: bytes) -> None:
    announced(face, swarm, 1, event="completed", left=0)
    announced(face, swarm, 2)
    sent = query(info_hash=[swarm, HASH])
    assert libtorrent.bdecode(face.scrape(KEY, sent)) == {
        b"files": {swarm: {b"complete": 1, b"downloaded": 1, b"incomplete": 1}}
    }
    for wrong in (b"", query(info_hash=[swarm, b"x"])):
        assert "info_hash" in refused(face.scrape(KEY, wrong))


NAMES = st.sampled_from(
    ["info_hash", "peer_id", "port", "left", "numwant", "event", "compact", "ip", "ipv4", "ipv6", "key", "", "x"]
)
VALUES = st.one_of(
    st.binary(max_size=30),
    st.integers().map(lambda n: str(n).encode()),
    st.ip_addresses().map(lambda address: str(address).encode()),
    st.sampled_from([HASH, PEER_ID, b"6881", b"0", b"stopped", b"started", b"completed"]),
)
QUERIES = st.one_of(
    st.binary(max_size=300),
    st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=20).map(
        lambda pairs: b"&".join(
            name.encode() + b"=" + (quote_from_bytes(value).encode() if escaped else value)
            for name, value, escaped in pairs
        )
    ),
    st.dictionaries(NAMES, VALUES).map(lambda given: query(**given)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(sent=QUERIES, connected_from=st.one_of(st.none(), st.text(max_size=20), st.ip_addresses().map(str)))
def test_any_query_gets_an_answer(face: AnnounceFace, swarm: bytes, sent: bytes, connected_from: str | None) -> None:
    for data in (sent, sent.replace(quote_from_bytes(HASH, safe="").encode(), quote_from_bytes(swarm).encode())):
        for answer in (face.announce(KEY, data, connected_from), face.scrape(KEY, data)):
            told = libtorrent.bdecode(answer)
            assert isinstance(told, dict)
            assert told


def test_the_key_is_as_good_as_the_token_and_does_not_tell_it() -> None:
    key = announce_key(TOKEN)
    # From another implementation: printf meshnet-announce-v1 | openssl dgst -sha256 -hmac join-0123456789
    assert key == "8e89a2fc1518830a2f1ba2fdff3288bb"
    assert announce_key_is(key, "join-0123456789")
    for wrong in ("", key[:-1], key + "0", key.upper(), "join-0123456789", "ü" * 32, announce_key("")):
        assert not announce_key_is(wrong, "join-0123456789")
    assert not announce_key_is(announce_key(""), "")
    assert announce_url("http://192.0.2.1:8080/", "join-0123456789") == f"http://192.0.2.1:8080/announce/{key}"
    with pytest.raises(UsageError, match="URL"):
        announce_url("192.0.2.1:8080", "join-0123456789")


def test_intervals_that_contradict_are_refused() -> None:
    assert TrackerSettings(announce_interval_s=60).peer_ttl_s == 150
    with pytest.raises(UsageError, match="announce_min_interval_s is 15, more than the interval of 10 s"):
        TrackerSettings(announce_interval_s=10)
    with pytest.raises(UsageError, match="announce_interval_s is 0"):
        TrackerSettings(announce_interval_s=0)
