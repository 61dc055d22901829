"""``python -m bench.route_requests``: opens and ends sessions at a tracker at random moments, and times the answers.

A process of its own: what it measures is what a gateway sees, not how busy the process is that plays the nodes. The
join token comes from the environment. Prints a JSON line when it begins, and one with all it measured at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence

from bench.simulated import Connection
from meshnet.cli import credentials
from meshnet.core import FinishCause, HopWork, RouteSession
from meshnet.tracker.messages import PREFIX, OpenSession, SessionEnd


class RouteRequests:
    """Requests at random moments, whether the ones before are answered or not."""

    def __init__(self, host: str, port: int, token: str, model: str, *, per_s: float, hold_s: float, seed: int) -> None:
        self._address = (host, port)
        self._token = token
        self._wanted = OpenSession(model=model, prompt_tokens=400, answer_tokens=100).model_dump_json().encode()
        self._per_s, self._hold_s = per_s, hold_s
        self._random = random.Random(seed)
        self._spare: list[Connection] = []
        self.took_s: dict[str, list[float]] = {"route": [], "end": []}
        self.failed = {"route": 0, "end": 0}

    async def run(self, seconds: float) -> None:
        """Go on for ``seconds``, then wait for the last sessions to end."""
        until_s = time.monotonic() + seconds
        requests: set[asyncio.Task[None]] = set()
        while time.monotonic() < until_s:
            await asyncio.sleep(self._random.expovariate(self._per_s))
            task = asyncio.create_task(self._session())
            requests.add(task)
            task.add_done_callback(requests.discard)
        await asyncio.gather(*requests)
        for connection in self._spare:
            connection.close()

    async def _session(self) -> None:
        answer = await self._timed("route", f"{PREFIX}/sessions", self._wanted)
        if answer is None:
            return
        session = RouteSession.model_validate_json(answer)
        await asyncio.sleep(self._hold_s)
        work = tuple(
            HopWork(
                epoch=session.epoch,
                hop_index=index,
                shard_id=shard.shard_id,
                layers=shard.layers,
                prefill_tokens=400,
                decode_tokens=99,
                compute_us=250_000,
                bytes_in=1_000_000,
                bytes_out=1_000_000,
            )
            for index, shard in enumerate(session.route.shards)
        )
        end = SessionEnd(finish_cause=FinishCause.LENGTH, generated_tokens=100, work=work)
        await self._timed("end", f"{PREFIX}/sessions/{session.session_id}/end", end.model_dump_json().encode())

    async def _timed(self, kind: str, path: str, body: bytes) -> bytes | None:
        """The body of a good answer, or None."""
        connection = self._spare.pop() if self._spare else Connection(*self._address, self._token)
        began_s = time.perf_counter()
        try:
            status, answer = await connection.post(path, body)
        except (OSError, EOFError, TimeoutError, ValueError):
            connection.close()
            status, answer = 0, b""
        self.took_s[kind].append(time.perf_counter() - began_s)
        self.failed[kind] += not 200 <= status < 300
        self._spare.append(connection)
        return answer if 200 <= status < 300 else None


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.route_requests")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--per-s", type=float, required=True)
    parser.add_argument("--hold-s", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    told = parser.parse_args(arguments)
    token = os.environ[credentials.JOIN_TOKEN_ENVIRONMENT]
    requests = RouteRequests(
        told.host, told.port, token, told.model, per_s=told.per_s, hold_s=told.hold_s, seed=told.seed
    )
    gc.disable()  # what is measured are the tracker's pauses, not those of this process
    print(json.dumps({"event": "begins"}), flush=True)
    asyncio.run(requests.run(told.seconds))
    print(json.dumps({"took_s": requests.took_s, "failed": requests.failed}))


if __name__ == "__main__":
    main(sys.argv[1:])
