"""An ordinary web server of files on loopback that remembers what it was asked for, and can be made to fail."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_CHUNK_BYTES = 16 << 10


@dataclass
class Request:
    """A GET: ``end`` is where the answer is to end, ``sent_bytes`` how much of it has been sent."""

    path: str
    status: int
    start: int = 0
    end: int = 0
    sent_bytes: int = 0


@dataclass
class FileServer:
    """Serves ``files`` by URL path. Change the attributes at any time; ``port`` of 0 becomes the real one."""

    files: dict[str, Path]
    port: int = 0
    #: False: answers with the whole file, whatever is asked for.
    ranges: bool = True
    #: Changes what is sent: called with the offset and the bytes.
    tamper: Callable[[int, bytes], bytes] | None = None
    #: URL path to where it redirects.
    redirects: dict[str, str] = field(default_factory=dict)
    bytes_per_s: float | None = None
    #: Certificate and key, for HTTPS.
    tls: tuple[Path, Path] | None = None
    requests: list[Request] = field(default_factory=list)
    cuts: int = 0
    _server: ThreadingHTTPServer | None = None
    _thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def sent_bytes(self) -> int:
        """Bytes of contents sent in all."""
        return sum(request.sent_bytes for request in list(self.requests))

    def asked_spans(self, path: str) -> list[tuple[int, int]]:
        """What was asked for of a file, request by request."""
        return [(one.start, one.end) for one in list(self.requests) if one.path == path]

    def sent_of(self, path: str) -> int:
        """Bytes sent of a file."""
        return sum(one.sent_bytes for one in list(self.requests) if one.path == path)

    def has_sent(self, path: str, n_bytes: int) -> bool:
        """True once so much of a file has been sent."""
        return self.sent_of(path) >= n_bytes

    @contextlib.contextmanager
    def running(self) -> Iterator[FileServer]:
        """Serve while the block runs."""
        self._start()
        try:
            yield self
        finally:
            self._stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Be away while the block runs, and come back on the same port."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def cut(self) -> None:
        """Break off all answers that are being sent."""
        self.cuts += 1

    def _start(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), _handler(self))
        self.port = self._server.server_address[1]
        if self.tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def _stop(self) -> None:
        server, self._server = self._server, None
        self.cut()
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def serves(self, server: object) -> bool:
        return self._server is server


def self_signed(directory: Path) -> tuple[Path, Path]:
    """Certificate and key of a server on loopback that nobody trusts, unless told to."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    paths = directory / "certificate.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(encoding))
    paths[1].write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    return paths


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients keep connections open

    def handle_error(self, *_: object) -> None:
        pass  # a client that went away in the middle is what some tests are about


def _handler(files: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            if not files.serves(self.server):
                self.close_connection = True  # it was kept open from before
                return
            target = files.redirects.get(self.path)
            if target is not None:
                self._plain(HTTPStatus.FOUND, location=target)
                return
            path = files.files.get(self.path.partition("?")[0])
            if path is None:
                self._plain(HTTPStatus.NOT_FOUND)
                return
            size = path.stat().st_size
            start, end, status = 0, size, HTTPStatus.OK
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
            if asked and files.ranges:
                start, end = int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)
                status = HTTPStatus.PARTIAL_CONTENT
                if start >= size:
                    self._plain(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                    return
            self.send_response(status)
            self.send_header("Content-Length", str(end - start))
            if status is HTTPStatus.PARTIAL_CONTENT:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            request = Request(self.path, status, start, end)
            files.requests.append(request)
            self.close_connection = True  # if it breaks off
            self._send(path, start, end, request)
            self.close_connection = request.sent_bytes < end - start

        def _send(self, path: Path, start: int, end: int, request: Request) -> None:
            began, cuts = time.monotonic(), files.cuts
            with path.open("rb") as file:
                file.seek(start)
                while start < end and files.cuts == cuts:
                    data = file.read(min(_CHUNK_BYTES, end - start))
                    if not data:
                        break
                    self.wfile.write(files.tamper(start, data) if files.tamper else data)
                    start += len(data)
                    request.sent_bytes += len(data)
                    if files.bytes_per_s:
                        time.sleep(max(0.0, began + request.sent_bytes / files.bytes_per_s - time.monotonic()))

        def _plain(self, status: HTTPStatus, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            files.requests.append(Request(self.path, status))

        def log_message(self, *_: object) -> None:
            pass

    return Handler
