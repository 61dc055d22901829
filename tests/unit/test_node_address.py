"""Where a worker listens and what is advertised."""

from __future__ import annotations

import pytest

from meshnet.errors import UsageError
from meshnet.node.address import Endpoint, choose_endpoint, split_address

LOCAL = "http://127.0.0.1:8080"


@pytest.mark.parametrize("tracker", [LOCAL, "http://localhost:8080", "http://127.1.2.3"])
def test_a_tracker_on_loopback_keeps_the_worker_there(tracker: str) -> None:
    endpoint = choose_endpoint(tracker)
    assert endpoint.listen.startswith("127.")
    assert endpoint.listen.endswith(":0")
    assert endpoint.advertised("127.0.0.1:4711") == endpoint.listen.replace(":0", ":4711")


def test_an_ipv6_tracker_keeps_brackets() -> None:
    assert choose_endpoint("http://[::1]:8080").advertised("[::1]:4711") == "[::1]:4711"


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:7000", None, "127.0.0.1:7000"),
        ("127.0.0.1:0", None, "127.0.0.1:4711"),
        # A wildcard is no address to call: the one that reaches the tracker is told instead.
        ("0.0.0.0:0", None, "127.0.0.1:4711"),
        ("0.0.0.0:7000", "mesh.example", "mesh.example:7000"),
        ("0.0.0.0:7000", "203.0.113.9:17000", "203.0.113.9:17000"),
        ("[::]:7000", "[2001:db8::9]:17000", "[2001:db8::9]:17000"),
        ("[::]:7000", "[2001:db8::9]", "[2001:db8::9]:7000"),
    ],
)
def test_what_is_advertised(listen: str, advertise: str | None, expected: str) -> None:
    endpoint = choose_endpoint(LOCAL, listen=listen, advertise=advertise)
    assert endpoint.listen == listen
    host, _, port = listen.rpartition(":")
    assert endpoint.advertised(f"{host}:{4711 if port == '0' else port}") == expected


@pytest.mark.parametrize("address", ["", "host", "host:", ":7000", "host:70000", "host:x", "a b:1", "::1:7000"])
def test_malformed_addresses_are_usage_errors(address: str) -> None:
    with pytest.raises(UsageError, match="--listen"):
        choose_endpoint(LOCAL, listen=address)


def test_advertising_port_0_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="port 0"):
        choose_endpoint(LOCAL, advertise="203.0.113.9:0")


def test_an_unknown_tracker_host_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"which local address reaches the tracker tracker\.invalid"):
        choose_endpoint("http://tracker.invalid:8080")


def test_the_worker_must_say_where_it_is() -> None:
    with pytest.raises(UsageError, match="the worker's address"):
        Endpoint("127.0.0.1:0", "127.0.0.1").advertised("nowhere")


def test_split_address() -> None:
    assert split_address("[::1]:80", what="x") == ("[::1]", 80)


@pytest.mark.parametrize("advertise", ["", ":", "x:", "::1", "[::1", "a b", "http://x:1"])
def test_a_malformed_advertised_address_is_shown_as_it_was_written(advertise: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_endpoint(LOCAL, advertise=advertise)
    assert f"--advertise {advertise!r}" in str(caught.value)


@pytest.mark.parametrize("advertise", ["0.0.0.0", "0.0.0.0:7000", "[::]", "[::]:7000"])
def test_a_wildcard_cannot_be_advertised(advertise: str) -> None:
    with pytest.raises(UsageError, match="no address that others could call"):
        choose_endpoint(LOCAL, advertise=advertise)
