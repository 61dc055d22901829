"""Whole-model llama.cpp and its RPC backend, by llama.cpp's own benchmark from the unpatched tree.

``llama-bench`` loads the model, warms up, computes the prompt (up to the context position to measure from), and times
the rest. It keeps a pool of threads that spin between tokens, does not sample, and has no client. It
maps the file, which is llama.cpp's default, unless it is told to have its memory as a shard worker has.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.samples import Timing
from meshnet.errors import MeshnetError, UsageError
from meshnet.node.worker import HUGE_PAGES

BENCH = "llama-bench"
RPC_SERVER = "ggml-rpc-server"
_TIMEOUT_S = 900.0
_START_TIMEOUT_S = 20.0
_START_ATTEMPTS = 5


class LlamaBenchError(MeshnetError):
    """One of llama.cpp's programs failed; the message has the end of what it said."""


class LlamaBench:
    """``llama-bench`` for one model and number of threads, on this process's CPU or on RPC servers.

    ``huge_pages``: it copies the weights, and asks for huge pages, as a shard worker does; by default it maps the file.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        threads: int,
        rpc_servers: Sequence[str] = (),
        *,
        huge_pages: bool = False,
    ) -> None:
        self._environment = dict([HUGE_PAGES]) if huge_pages else {}
        self._command = [str(binary(directory, BENCH)), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]
        if rpc_servers:
            self._command += ["--rpc", ",".join(rpc_servers), "-ngl", "99"]
        if huge_pages:
            self._command += ["--load-mode", "none"]

    async def decode(self, from_position: int, tokens: int) -> Timing:
        """Time ``tokens`` single-token steps after a context of ``from_position`` tokens."""
        return await self._run(["-p", "0", "-n", str(tokens), "-d", str(from_position)], tokens)

    async def prefill(self, tokens: int) -> Timing:
        """Time a prompt of ``tokens`` from an empty context."""
        # The warm-up would be a second prompt of the same length. What it saves, page faults, is under 1 % of that.
        return await self._run(["-p", str(tokens), "-n", "0", "--no-warmup"], tokens)

    async def _run(self, arguments: Sequence[str], tokens: int) -> Timing:
        output = await _output([*self._command, *arguments], self._environment)
        try:
            (result,) = json.loads(output)
            return Timing(tokens=tokens, duration_us=result["avg_ns"] / 1000)
        except (ValueError, KeyError, TypeError) as error:
            raise LlamaBenchError(f"{BENCH} did not print the one result asked for: {output[-300:]!r}") from error


@asynccontextmanager
async def rpc_servers(directory: Path, count: int, threads: int) -> AsyncIterator[list[str]]:
    """``count`` RPC servers on loopback; yields their addresses."""
    processes: list[asyncio.subprocess.Process] = []
    try:
        addresses = []
        for _ in range(count):
            process, address = await _start_rpc_server(binary(directory, RPC_SERVER), threads)
            processes.append(process)
            addresses.append(address)
        yield addresses
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


def binary(directory: Path, name: str) -> Path:
    """The program ``name`` in ``directory``.

    Raises:
        UsageError: it is not there.
    """
    path = directory / name
    if not os.access(path, os.X_OK):
        raise UsageError(f"{path} is not built; run `python3 native/upstream.py unpatched --target {name}`")
    return path


async def _start_rpc_server(program: Path, threads: int) -> tuple[asyncio.subprocess.Process, str]:
    # It cannot choose a port by itself, so another process may take the port between our look and its start.
    for _ in range(_START_ATTEMPTS):
        port = _free_port()
        process = await asyncio.create_subprocess_exec(
            *(str(program), "-H", "127.0.0.1", "-p", str(port), "-t", str(threads)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        if await _accepts(port, process):
            return process, f"127.0.0.1:{port}"
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise LlamaBenchError(f"{program} did not start on a loopback port in {_START_ATTEMPTS} attempts")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _accepts(port: int, process: asyncio.subprocess.Process) -> bool:
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while process.returncode is None:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    await writer.wait_closed()
                    return True
    except TimeoutError:
        pass
    return False


async def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise LlamaBenchError(f"{command[0]} did not end within {_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        said = stderr.decode(errors="replace").strip()[-500:]
        raise LlamaBenchError(f"{' '.join(command)} failed with exit code {process.returncode}: {said}")
    return stdout.decode(errors="replace")
