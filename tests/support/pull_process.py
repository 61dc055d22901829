"""Pulls in processes that can be killed: ``python -m tests.support.pull_process``, driven by `Pulls`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshnet.artifact import swarm
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.library import Library
from meshnet.artifact.provider import Provider, providing
from tests.support.swarm import OPTIONS, Peer


@dataclass(frozen=True)
class Pull:
    """What a process is to do; it ends when it has all of ``wanted``, or, with ``stay``, never."""

    store: Path
    wanted: Sequence[int]
    web_seeds: Sequence[str] = ()
    peers: Sequence[Peer] = ()
    stay: bool = False
    confirm_every_s: float = 0.1


class Pulls:
    """Starts pulls of one artifact quickly: each is a fork of a process that has loaded everything."""

    def __init__(self, bundle: Bundle, directory: Path) -> None:
        self._manifest = directory / "pulls.manifest.json"
        self._torrent = directory / "pulls.torrent"
        self._manifest.write_bytes(bundle.manifest.to_json())
        self._torrent.write_bytes(bundle.torrent)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Pulls:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.pull_process", str(self._manifest), str(self._torrent)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that it can be killed with its forks
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                async with asyncio.timeout(10):
                    await self._process.wait()
            except TimeoutError:
                # A pull that does not end is being waited for.
                os.killpg(self._process.pid, signal.SIGKILL)
                raise

    async def start(self, pull: Pull) -> int:
        """The process id of a new pull."""
        order = {**vars(pull), "store": str(pull.store), "wanted": list(pull.wanted)}
        await self._send(order)
        return int((await self._answer())["pid"])

    async def end(self, pid: int, *, kill: bool) -> int:
        """Wait for the end of a pull, or bring it about with SIGKILL; its exit code."""
        if kill:
            os.kill(pid, signal.SIGKILL)
        await self._send({"wait": pid})
        return int((await self._answer())["code"])

    async def _send(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()

    async def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            return json.loads(await self._process.stdout.readline())


def _main(manifest: str, torrent: str) -> None:
    bundle = Bundle.parse(Path(manifest).read_bytes(), Path(torrent).read_bytes())
    children: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            code = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
            children.discard(order["wait"])
            print(json.dumps({"code": code}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            # Orders and answers are its parent's.
            for descriptor in (0, 1):
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            code = 1
            try:
                asyncio.run(_pull(bundle, order))
                code = 0
            finally:
                os._exit(code)
        children.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


async def _pull(bundle: Bundle, order: dict[str, Any]) -> None:
    swarm.CONFIRM_EVERY_S = order["confirm_every_s"]
    library = Library(Path(order["store"]))
    peers = [(host, port) for host, port in order["peers"]]
    puller = Provider(library, library.add(bundle), OPTIONS, peers=peers, web_seeds=order["web_seeds"])
    puller.want(order["wanted"])
    async with providing(puller):
        await puller.wait_complete()
        if order["stay"]:
            await asyncio.Event().wait()


if __name__ == "__main__":
    _main(*sys.argv[1:])
