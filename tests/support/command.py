"""Running ``meshnet`` as a person would: a process, its output, its exit code, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str


def environment(store: Path, **changes: str) -> dict[str, str]:
    """This process's environment without its own Meshnet settings, and with ``store``."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("MESHNET_") or name == "MESHNET_WORKER"
    }
    return {**clean, "MESHNET_STORE": str(store), **changes}


async def start(*arguments: str, env: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start ``meshnet <arguments>`` with pipes."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "meshnet.cli", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(env),
    )


async def run(*arguments: str, env: Mapping[str, str], stdin: str = "") -> Ran:
    """Run ``meshnet <arguments>`` to its end."""
    return await finish(await start(*arguments, env=env), stdin=stdin)


async def finish(process: asyncio.subprocess.Process, *, stdin: str = "") -> Ran:
    """Wait for a started command."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate(stdin.encode())
    except BaseException:
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise
    return Ran(process.returncode if process.returncode is not None else -1, out.decode(), err.decode())


async def line_with(stream: asyncio.StreamReader | None, text: str) -> str:
    """Read lines up to the first that holds ``text``."""
    assert stream is not None
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        while line := (await stream.readline()).decode():
            seen.append(line)
            if text in line:
                return line
    raise AssertionError(f"no line with {text!r} in {seen}")


def processes_of(store: Path) -> list[int]:
    """All processes that have this store in their environment, whoever their parent is now."""
    wanted = f"MESHNET_STORE={store}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


async def none_left(store: Path) -> None:
    """Wait until no process of ``store`` is left.

    Raises:
        TimeoutError: some are, after the deadline.
    """
    async with asyncio.timeout(DEADLINE_S):
        while processes_of(store):  # noqa: ASYNC110 (other processes end)
            await asyncio.sleep(0.02)
