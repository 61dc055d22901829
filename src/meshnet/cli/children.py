"""Child processes of a command: started with a pipe that ends them with it, told apart, always cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from meshnet.errors import MeshnetError

#: From SIGTERM to SIGKILL.
STOP_TIMEOUT_S = 20.0
TAIL_LINES = 8
MAX_LINE_BYTES = 1 << 20


class ChildError(MeshnetError):
    """A child process ended or was silent; the message has the end of its log."""


class Child:
    """A ``meshnet`` command running in its own process; standard error goes to ``log``."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    async def event(self, timeout_s: float) -> dict[str, Any]:
        """The next JSON line that it prints.

        Raises:
            ChildError: it ended, or printed none in time.
        """
        stdout = self.process.stdout
        try:
            async with asyncio.timeout(timeout_s):
                line = await stdout.readline() if stdout is not None else b""
                if not line:
                    await self.process.wait()
        except TimeoutError:
            raise ChildError(f"{self.name} was not ready within {timeout_s:g} s{self.told()}") from None
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ChildError(f"{self.name} ended with exit code {self.process.returncode}{self.told()}")
        return event

    def told(self) -> str:
        """The last lines of its log, to end a message with."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"; it said: {' | '.join(lines[-TAIL_LINES:])}" if lines else ""


class Children:
    """All children of one command; made by `children`."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._started: list[Child] = []

    async def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start ``meshnet <arguments>`` with ``environment`` on top of this process's own."""
        log = self._log_dir / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "meshnet.cli", *arguments, "--exit-with-parent"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                limit=MAX_LINE_BYTES,
                # Ctrl-C reaches this command alone, which stops its children in order.
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._started.append(child)
        return child

    async def any_ended(self) -> Child:
        """Wait until a child ends by itself."""
        waiting = {asyncio.create_task(child.process.wait()): child for child in self._started}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return waiting[next(iter(done))]
        finally:
            for task in waiting:
                task.cancel()

    async def stop(self) -> None:
        """End all, the last started first: SIGTERM, and SIGKILL to whoever takes too long."""
        for child in reversed(self._started):
            _signal(child, signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await child.process.wait()
            except TimeoutError:
                _signal(child, signal.SIGKILL)
                await child.process.wait()
        self._started.clear()

    def kill(self) -> None:
        """End all at once, without waiting."""
        for child in self._started:
            _signal(child, signal.SIGKILL)


@asynccontextmanager
async def children(log_dir: Path) -> AsyncIterator[Children]:
    """Children that all end with the block, however it ends."""
    started = Children(log_dir)
    try:
        yield started
    finally:
        stopping = asyncio.create_task(started.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            # Asked again to hurry. Their own children go with them: their standard input closes.
            started.kill()
            await stopping
            raise


def _signal(child: Child, number: signal.Signals) -> None:
    # Not send_signal: that one polls, and takes the exit code of a process that has just ended from asyncio.
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, number)
