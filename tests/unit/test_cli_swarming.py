from __future__ import annotations

import pytest

from meshnet.artifact.swarm_settings import SwarmOptions, session_settings
from meshnet.cli.swarming import swarm_options
from meshnet.errors import UsageError
from meshnet.node.address import Endpoint

LOOPBACK = Endpoint("127.0.0.1:7000", "127.0.0.1")


def test_the_swarm_listens_where_the_worker_does_at_a_port_of_its_own() -> None:
    options = swarm_options(LOOPBACK, None, None, None)
    assert options == SwarmOptions(listen="127.0.0.1:0", announce_host="127.0.0.1")


def test_all_interfaces_share_one_port() -> None:
    """libtorrent would take one for each, and only one can be announced."""
    options = swarm_options(Endpoint("0.0.0.0:7000", "192.0.2.7"), None, None, None)
    host, _, port = options.listen.rpartition(":")
    assert host == "0.0.0.0"
    assert 0 < int(port) < 65536
    assert swarm_options(LOOPBACK, "0.0.0.0:6881", None, None).listen == "0.0.0.0:6881"


def test_a_name_is_not_announced_as_an_address() -> None:
    assert swarm_options(Endpoint("127.0.0.1:0", "node.example"), None, None, None).announce_host is None


@pytest.mark.parametrize(("text", "rate"), [("2MB", 2_000_000), ("1.5 MB/s", 1_500_000), ("64k", 64_000)])
def test_rates(text: str, rate: int) -> None:
    assert swarm_options(LOOPBACK, None, text, None).upload_limit_bytes_per_s == rate
    assert swarm_options(LOOPBACK, None, None, text).download_limit_bytes_per_s == rate


@pytest.mark.parametrize("text", ["", "fast", "-1", "10", "2 MB per s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--upload-limit"):
        swarm_options(LOOPBACK, None, text, None)


def test_the_router_is_asked_only_if_told_so_and_peers_are_never_looked_for() -> None:
    for map_ports in (False, True):
        settings = session_settings(swarm_options(LOOPBACK, None, None, None, map_ports=map_ports))
        assert (settings["enable_upnp"], settings["enable_natpmp"]) == (map_ports, map_ports)
        assert not settings["enable_dht"]
        assert not settings["enable_lsd"]
