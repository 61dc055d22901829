"""``meshnet doctor``: is this machine ready, and if not, what to do."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer

from meshnet.cli import credentials
from meshnet.cli.node import TRACKER_ENVIRONMENT, JoinTokenOption
from meshnet.cli.serve import DEFAULT_PORT
from meshnet.errors import MeshnetError, UsageError

WORKER_TIMEOUT_S = 30
MIN_FREE_BYTES = 1 << 30
COMFORTABLE_FREE_BYTES = 10 << 30
COMFORTABLE_MEMORY_BYTES = 2 << 30

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report. ``advice`` says what to do, unless all is well."""

    level: str
    name: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.name:<8} {self.found}" + (f"; {self.advice}" if self.advice else "")


def doctor(
    tracker: Annotated[str | None, typer.Option(help="Also try this tracker.", envvar=TRACKER_ENVIRONMENT)] = None,
    join_token: JoinTokenOption = None,
    port: Annotated[int, typer.Option(help="Port that serve would take.", min=1, max=65535)] = DEFAULT_PORT,
) -> None:
    """Check this machine: one line per check, exit code 1 if one fails."""
    checks: list[Callable[[], Check]] = [
        check_python,
        check_worker,
        check_store,
        check_identity,
        check_memory,
        check_pages,
        check_cores,
        lambda: check_port(port),
    ]
    if tracker is not None:
        checks.append(lambda: check_tracker(tracker, join_token))
    failed = False
    for check in checks:
        done = check()
        print(done, flush=True)
        failed = failed or done.level == FAIL
    if failed:
        raise typer.Exit(1)


def check_python() -> Check:
    """Python runs this, so its version is right; what it needs beside itself may not be there."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        # Compiled parts, and stubs that refuse a protobuf older than themselves.
        importlib.import_module("grpc")
        importlib.import_module("meshnet.rpc.generated.shard_pb2")
    except Exception as error:
        return Check(FAIL, "python", f"{version} lacks a part: {error}", "run `make venv`, or install meshnet again")
    return Check(OK, "python", f"{version} ({sys.executable})")


def check_worker() -> Check:
    """The binary is there, runs, and tells its build."""
    from meshnet.engines.native import find_worker

    try:
        binary = find_worker()
    except UsageError as error:
        return Check(FAIL, "worker", str(error))
    command = [str(binary), "--engine", "test", "--model", "test:2", "--layers", "all", "--describe"]
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WORKER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(FAIL, "worker", f"{binary} does not run: {error}", "rebuild it with `make worker`")
    if ran.returncode != 0:
        told = " ".join(ran.stderr.split())[-300:] or f"exit code {ran.returncode}"
        return Check(FAIL, "worker", f"{binary} does not run: {told}", "rebuild it with `make worker`")
    try:
        build = str(json.loads(ran.stdout)["buildId"])
    except (ValueError, KeyError, TypeError) as error:
        return Check(FAIL, "worker", f"{binary} does not tell its build ({error!r})", "rebuild it with `make worker`")
    return Check(OK, "worker", f"{binary}, build {build}")


def check_store() -> Check:
    from meshnet.artifact.library import QUOTA_ENVIRONMENT
    from meshnet.artifact.store import store_root

    try:
        root = store_root()
        bounds, is_full = _bounds(root)
    except MeshnetError as error:
        return Check(FAIL, "store", str(error))
    free_bytes = shutil.disk_usage(root).free
    found = f"{root}, {free_bytes / 1e9:.1f} GB free{bounds}"
    if free_bytes < MIN_FREE_BYTES:
        return Check(FAIL, "store", found, "free some space, or set MESHNET_STORE to a larger disk")
    if is_full:
        return Check(
            WARN, "store", found, f"remove an artifact (`meshnet artifact remove`), or raise {QUOTA_ENVIRONMENT}"
        )
    if free_bytes < COMFORTABLE_FREE_BYTES:
        return Check(WARN, "store", found, "enough for small models only; MESHNET_STORE names another disk")
    return Check(OK, "store", found)


def _bounds(root: Path) -> tuple[str, bool]:
    """What limits the store beside the disk, in words, and whether it is full."""
    from meshnet.artifact.disk import disk_bytes
    from meshnet.artifact.library import quota
    from meshnet.artifact.store import MOUNT_ENVIRONMENT

    drive = os.environ.get(MOUNT_ENVIRONMENT, "").strip()
    told = f", on the drive at {drive}" if drive else ""
    quota_bytes = quota()
    if quota_bytes is None:
        return told, False
    used_bytes = disk_bytes(root / "artifacts")
    return f"{told}, {used_bytes / 1e9:.1f} of a quota of {quota_bytes / 1e9:.1f} GB taken", used_bytes >= quota_bytes


def check_memory() -> Check:
    try:
        with open("/proc/meminfo") as file:
            told = re.search(r"^MemAvailable:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        told = None
    if told is None:
        return Check(WARN, "memory", "this system does not tell how much is available", "check it by hand")
    available_bytes = int(told[1]) * 1024
    found = f"{available_bytes / 1e9:.1f} GB available"
    if available_bytes < COMFORTABLE_MEMORY_BYTES:
        return Check(WARN, "memory", found, "serve few layers or a small --context")
    return Check(OK, "memory", found)


def check_pages(path: Path = HUGE_PAGES) -> Check:
    """Whether the worker can have huge pages (docs/decisions/0007)."""
    try:
        told = re.search(r"\[(\w+)]", path.read_text())
    except OSError:
        told = None
    if told is None:
        return Check(WARN, "pages", "this system has no huge pages", "every token takes longer")
    if told[1] == "never":
        return Check(WARN, "pages", "huge pages: never", f"write madvise to {path}: every token takes longer without")
    return Check(OK, "pages", f"huge pages: {told[1]}")


def check_cores() -> Check:
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if n_cores < 2:
        return Check(WARN, "cores", str(n_cores), "the worker shares it with everything else; expect low speed")
    return Check(OK, "cores", str(n_cores))


def check_port(port: int) -> Check:
    """The port of `meshnet serve` is free, or taken by Meshnet itself."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if _is_meshnet(port):
                return Check(OK, "port", f"{port} is taken by a running `meshnet serve`")
            return Check(WARN, "port", f"{port} cannot be taken: {error.strerror}", "start `meshnet serve` with --port")
    return Check(OK, "port", f"{port} is free")


def check_tracker(url: str, given_token: str | None) -> Check:
    """It answers, takes the join token, and no shard waits in vain for its first session."""
    from meshnet.cli.status import not_ready_lines
    from meshnet.tracker.client import TrackerClient
    from meshnet.tracker.messages import TrackerStatus

    async def fetch(token: str) -> TrackerStatus:
        async with TrackerClient(url, token, timeout_s=5) as client:
            return await client.status()

    try:
        told = asyncio.run(fetch(credentials.join_token(given_token).value))
    except MeshnetError as error:
        return Check(FAIL, "tracker", str(error))
    live = sum(node.state == "live" for node in told.nodes)
    served = sum(model.routable for model in told.models)
    found = f"{url}: {live} nodes, {served} models served, version {told.version}"
    waiting = not_ready_lines(told)
    if waiting:
        more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        return Check(WARN, "tracker", found, f"{waiting[0]}{more}; see `meshnet status`")
    return Check(OK, "tracker", found)


def check_identity() -> Check:
    """The identities that nodes of this machine have are whole, and nobody else can read their keys."""
    from meshnet.artifact.store import store_root
    from meshnet.node.identity import read_key

    try:
        directory = store_root() / "nodes"
    except MeshnetError:
        return Check(WARN, "identity", "not to be seen without a store")
    try:
        keys = sorted(directory.glob("*/node.key"))
        for path in keys:
            read_key(path)
            if path.stat().st_mode & 0o077:
                return Check(WARN, "identity", f"others can read {path}", f"run `chmod 600 {path}`")
    except (MeshnetError, OSError) as error:
        return Check(FAIL, "identity", str(error))
    return Check(OK, "identity", f"{len(keys)} nodes of this machine have a key" if keys else "made at the first start")


def _is_meshnet(port: int) -> bool:
    # Any tracker answers this with its own kind of refusal, a gateway with its own kind of health.
    try:
        refusal = httpx.get(f"http://127.0.0.1:{port}/tracker/v1/status", timeout=2, trust_env=False)
        return bool(refusal.json()["error"]["code"] == "not_authorized")
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False
