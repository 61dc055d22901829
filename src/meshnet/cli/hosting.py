"""Running an ASGI application on one port, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meshnet.cli.stopping import stop_requests
from meshnet.errors import UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

#: What begins like this is the tracker's: calls of nodes, and announces of BitTorrent clients.
TRACKER_PATHS = ("/tracker/", "/announce/", "/scrape/")
#: Requests that still run this long after the first stop request are cut off.
SHUTDOWN_S = 10
#: Of a request's head: its line and headers.
MAX_HEAD_BYTES = 64 << 10
#: From the connection to the end of a request's head. A client that keeps a fresh connection in reserve opens another.
HEAD_TIMEOUT_S = 60.0


def side_by_side(tracker: Application, gateway: Application) -> Application:
    """One application of two: `TRACKER_PATHS` go to the tracker, all else (with start and end) to the gateway.

    Neither sees the other's middleware or error shapes.
    """

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        to_tracker = scope["type"] == "http" and str(scope["path"]).startswith(TRACKER_PATHS)
        await (tracker if to_tracker else gateway)(scope, receive, send)

    return application


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        UsageError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host {host} is no address ({error.strerror})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use; is another `meshnet serve` running? Choose another with --port"
            ) from error
        raise UsageError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from error
    return listener


def reachable_url(listener: socket.socket) -> str:
    """The URL to tell people: a wildcard address is replaced by this machine's own towards the default route."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = _outward_address(listener.family) or ("::1" if address.version == 6 else "127.0.0.1")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run(
    application: Application, listener: socket.socket, *, on_ready: Callable[[], None], with_parent: bool
) -> None:
    """Serve until SIGTERM, SIGINT or (``with_parent``) the end of standard input.

    Requests then get ``SHUTDOWN_S`` to end. A second stop request cuts them off at once, a third
    leaves without cleaning up.

    Raises:
        UsageError: the application could not start.
    """
    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        server_header=False,
        http=_Protocol,
        # Longer than clients keep idle connections (httpx: 5 s), so that none is closed just as it is used again.
        timeout_keep_alive=75,
    )
    server = _Server(config, on_ready)

    def cut_off() -> None:
        # Not Uvicorn's own time limit: that one ends the application before the cancelled requests have cleaned up.
        running = list(server.server_state.tasks)
        if running:
            log.warning("cutting off %d requests that are still running", len(running))
        for task in running:
            task.cancel()

    requests_to_stop = 0

    def stop() -> None:
        nonlocal requests_to_stop
        requests_to_stop += 1
        server.should_exit = True
        if requests_to_stop == 1:
            asyncio.get_running_loop().call_later(SHUTDOWN_S, cut_off)
        elif requests_to_stop == 2:
            cut_off()
        else:
            server.force_exit = True

    with stop_requests(stop, with_parent=with_parent):
        await server.serve(sockets=[listener])
    if not server.started:
        raise UsageError("the server did not start; the log says why")


class _Protocol(HttpToolsProtocol):
    """Uvicorn's HTTP, and a connection whose request head is too large, or not there in time, is closed.

    Uvicorn bounds only the pause between two requests: connections that never send their first would pile up until no
    node or client could get in.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Stops the keep-alive timer, so that from here on this one must run until a request has begun.
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            if not self.transport.is_closing():
                self.send_400_response(f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
        elif self._head_timer is None:
            self._arm()

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self.transport.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own would raise SIGTERM again after a clean end; `stop_requests` handles signals.
        yield


def _outward_address(family: socket.AddressFamily) -> str | None:
    # Connecting a datagram socket sends nothing; the address is one reserved for documentation.
    target = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0]).partition("%")[0]
