"""One worker process: started, watched, drained. It dies with this process, because its standard input closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from meshnet.core import Shard
from meshnet.engines.native import KEY_ENVIRONMENT, WorkerOptions, worker_command
from meshnet.errors import RangeRefused, UsageError, WorkerError
from meshnet.node.address import Endpoint
from meshnet.node.model import ILLEGAL_CUT, ModelSource
from meshnet.rpc.convert import shard_from_description
from meshnet.rpc.generated import shard_pb2 as pb

log = logging.getLogger(__name__)

#: The ready line holds the chat template.
MAX_LINE_BYTES = 8 << 20
#: Lines of standard error kept for the message if the worker dies.
TAIL_LINES = 20
#: Large blocks of memory in huge pages where the system offers them (glibc 2.35): every token goes through all weights.
HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
#: Not the worker's business.
WITHHELD = ("MESHNET_API_KEY", "MESHNET_JOIN_TOKEN")


@dataclass(frozen=True)
class WorkerPlan:
    """What to start, under which names, and where."""

    binary: Path
    options: WorkerOptions
    model_name: str
    artifact_digest: str
    endpoint: Endpoint
    #: The bytes behind ``artifact_digest``; None for an engine that reads none.
    source: ModelSource | None = None

    async def prepare_model(self) -> None:
        """Wait until the model's bytes are there. Raises ``ArtifactError`` or ``StoreError`` if they cannot be had."""
        if self.source is not None:
            await self.source.prepare()

    def check_model(self) -> None:
        """Raises ``ArtifactError`` if the files are no longer the artifact that ``artifact_digest`` names."""
        if self.source is not None:
            self.source.check()


class Worker:
    """A worker process that is ready: made by `start`, ended by `stop` or `kill`."""

    def __init__(self, process: asyncio.subprocess.Process, shard_id: str, worker_key: str) -> None:
        self.shard_id = shard_id
        self.worker_key = worker_key
        self._process = process
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._shard: Shard | None = None
        #: Where the worker itself is bound: reachable from here even if the advertised address is not.
        self.address = ""
        self._pumps = [asyncio.create_task(self._pump_stderr())]

    @classmethod
    async def start(cls, plan: WorkerPlan, shard_id: str, *, timeout_s: float) -> Worker:
        """Start a process with a fresh ticket key and wait until it is ready.

        Raises:
            WorkerError: it could not be started, refused to load (its own reason), died, or was not ready in time.
        """
        worker_key = secrets.token_hex(32)
        command = worker_command(
            plan.binary,
            plan.options,
            listen=plan.endpoint.listen,
            shard_id=shard_id,
            model_name=plan.model_name,
            artifact_digest=plan.artifact_digest,
        )
        inherited = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        inherited.setdefault(*HUGE_PAGES)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**inherited, KEY_ENVIRONMENT: worker_key},
                limit=MAX_LINE_BYTES,
                # Its own session: Ctrl-C in a terminal reaches the agent alone, which then drains the worker.
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"cannot start {plan.binary}: {error.strerror}") from error
        worker = cls(process, shard_id, worker_key)
        try:
            async with asyncio.timeout(timeout_s):
                await worker._become_ready(plan)
        except TimeoutError:
            await worker.kill()
            raise WorkerError(f"the worker was not ready within {timeout_s:g} s{worker.told()}") from None
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def shard(self) -> Shard:
        """What the worker serves, under the address that others reach."""
        if self._shard is None:
            raise WorkerError(f"worker {self.shard_id} is not ready")
        return self._shard

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Wait for the process to end; says how it did."""
        await self._process.wait()
        await asyncio.wait(self._pumps)  # not gather: being cancelled here must not cancel them
        return _ending(self._process.returncode)

    def told(self) -> str:
        """The last lines of the worker's standard error, to end a message with."""
        return f"; it said: {' | '.join(self._tail)}" if self._tail else ""

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Ask the worker to drain and wait for its end; kill it if that takes too long."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_timeout_s):
                await self.wait()
        except TimeoutError:
            log.warning("worker %s did not drain within %g s; killing it", self.shard_id, drain_timeout_s)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process now."""
        self._signal(signal.SIGKILL)
        await self.wait()

    def signal_kill(self) -> None:
        """Send SIGKILL without waiting."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Not send_signal: that one polls, and takes the exit code of a process that has just ended from asyncio.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _become_ready(self, plan: WorkerPlan) -> None:
        event = await self._read_event()
        if event.get("event") == "failed":
            message = str(event.get("message") or "no reason given")
            kind = RangeRefused if event.get("code") == ILLEGAL_CUT else WorkerError
            raise kind(f"the worker cannot load {plan.options.model} ({event.get('code')}): {message}")
        try:
            description = ParseDict(event["description"], pb.DescribeResponse(), ignore_unknown_fields=True)
            self.address = str(event["address"])
            address = plan.endpoint.advertised(self.address)
            self._shard = shard_from_description(description, address, model=plan.model_name)
        except (KeyError, TypeError, ValueError, ParseError, UsageError) as error:
            raise WorkerError(f"the worker's ready line is malformed: {error}") from error
        if self._shard.shard_id != self.shard_id:
            raise WorkerError(f"the worker calls itself {self._shard.shard_id}, not {self.shard_id}")
        self._pumps.append(asyncio.create_task(self._pump_stdout()))

    async def _read_event(self) -> dict[str, Any]:
        stdout = _stream(self._process.stdout)
        while True:
            try:
                line = await stdout.readline()
            except ValueError as error:
                raise WorkerError(f"the worker's ready line is longer than {MAX_LINE_BYTES} bytes") from error
            if not line:
                raise WorkerError(f"the worker died before it was ready ({await self.wait()}){self.told()}")
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and event.get("event") in ("ready", "failed"):
                return event
            log.info("%s: %s", self.shard_id, line.decode(errors="replace").rstrip())

    async def _pump_stdout(self) -> None:
        async for line in _lines(_stream(self._process.stdout)):
            log.info("%s: %s", self.shard_id, line)

    async def _pump_stderr(self) -> None:
        async for line in _lines(_stream(self._process.stderr)):
            self._tail.append(line)
            log.info("%s: %s", self.shard_id, line)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue  # longer than any line should be: asyncio has dropped it
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        if text:
            yield text


def _stream(stream: asyncio.StreamReader | None) -> asyncio.StreamReader:
    if stream is None:
        raise WorkerError("the worker has no pipes")
    return stream


def _ending(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
