"""A PostgreSQL server of one's own: in a temporary directory, on a free loopback port, as a user that is not root."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: The server refuses to run as root; Debian's package brings this user.
USER = "postgres"
DEADLINE_S = 60.0


class PostgresServer:
    """Started by `postgres_server`. It can be killed and started again on the same port and data."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def initialize(self) -> None:
        """Make the data directory."""
        options = ("--auth=trust", f"--username={USER}", "--encoding=UTF8", "--no-sync", f"--pgdata={self._data}")
        _run(_as_user([_program("initdb"), *options]), cwd=self._directory)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        arguments = [_program("postgres"), "-D", str(self._data), "-p", str(self._port), "-k", str(self._directory)]
        # It is killed, but the machine does not lose power.
        for setting in ("listen_addresses=127.0.0.1", "fsync=off", "max_connections=50"):
            arguments += ["-c", setting]
        deadline_s = time.monotonic() + DEADLINE_S
        with (self._directory / "log").open("ab") as log:
            while not self._answers():
                if self._process is None or self._process.poll() is not None:
                    # Again, if processes of the one that was killed still hold its memory.
                    self._process = subprocess.Popen(_as_user(arguments), cwd=self._directory, stdout=log, stderr=log)
                if time.monotonic() > deadline_s:
                    raise AssertionError(f"PostgreSQL does not start: {(self._directory / 'log').read_text()}")
                time.sleep(0.05)

    def kill(self) -> None:
        """End the server without giving it a chance to say goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it at once, and all its processes; nobody needs its data any more."""
        self._end(signal.SIGQUIT)

    def database(self) -> str:
        """The URL of a new and empty database, as a person would write it."""
        name = f"test_{secrets.token_hex(6)}"
        at = ["--host=127.0.0.1", f"--port={self._port}", f"--username={USER}"]
        _run([_program("createdb"), *at, name], cwd=self._directory)
        return f"postgresql://{USER}@127.0.0.1:{self._port}/{name}"

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    def _answers(self) -> bool:
        ready = [_program("pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={self._port}"]
        running = self._process is not None and self._process.poll() is None
        return running and subprocess.run(ready, check=False, timeout=DEADLINE_S).returncode == 0

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=DEADLINE_S)
            self._process = None


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; it and its data are gone after the block."""
    # Not pytest's directory: only this user may enter that.
    directory = Path(tempfile.mkdtemp(prefix="meshnet-postgres-", dir="/var/tmp"))
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, USER, USER)
        server = PostgresServer(directory, _free_port())
        server.initialize()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


def _as_user(command: Sequence[str]) -> list[str]:
    if os.geteuid() != 0:
        return list(command)
    user = pwd.getpwnam(USER)
    # Dies with the tests, however they die.
    as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--pdeathsig=KILL"]
    return [*as_user, *command]


def _program(name: str) -> str:
    """A program of the newest PostgreSQL here; Debian keeps them off the PATH."""
    found = [path for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}") if path.parts[-3].isdecimal()]
    newest = max(found, key=lambda path: int(path.parts[-3]), default=None)
    program = str(newest) if newest else shutil.which(name)
    if program is None:
        raise AssertionError(f"{name} is not there: PostgreSQL is needed (`make packages-test` installs it)")
    return program


def _run(command: Sequence[str], *, cwd: Path) -> None:
    ran = subprocess.run(
        command, cwd=cwd, check=False, timeout=DEADLINE_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ran.returncode != 0:
        raise AssertionError(f"{command[-1]}: exit code {ran.returncode}: {ran.stdout}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
