"""``meshnet serve``: tracker and gateway, together or apart."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from meshnet.cli import credentials
from meshnet.cli.credentials import Secret
from meshnet.errors import UsageError

log = logging.getLogger(__name__)

DEFAULT_PORT = 8080


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 lets other machines in: use a private network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = DEFAULT_PORT,
    tracker_only: Annotated[bool, typer.Option("--tracker-only", help="No API, only the tracker.")] = False,
    gateway_only: Annotated[
        bool, typer.Option("--gateway-only", help="Only the API, on the tracker named by --tracker.")
    ] = False,
    tracker: Annotated[str | None, typer.Option(help="URL of the tracker, with --gateway-only.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the tracker keeps its database. [default: STORE/tracker]")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="URL of another database: postgresql://USER:PASSWORD@HOST/NAME.")
    ] = None,
    heartbeat_s: Annotated[float, typer.Option("--heartbeat-s", help="How often nodes report, in seconds.")] = 2.0,
    lease_ttl_s: Annotated[
        float, typer.Option("--lease-ttl-s", help="A node silent for this long is lost, in seconds.")
    ] = 6.0,
    step_timeout_s: Annotated[
        float, typer.Option("--step-timeout-s", help="A hop that needs longer for one step is lost, in seconds.")
    ] = 60.0,
    repair_timeout_s: Annotated[
        float,
        typer.Option(
            "--repair-timeout-s",
            help="How long an answer whose route broke waits for another, in seconds; 0: it ends at once.",
        ),
    ] = 30.0,
    session_lease_s: Annotated[
        float,
        typer.Option("--session-lease-s", min=3, help="A session not renewed for this long is an orphan, in seconds."),
    ] = 60.0,
    deploy: Annotated[
        list[str] | None,
        typer.Option(
            help="ARTIFACT[:context=N,sessions=K,replicas=R] that nodes without --layers are to serve; repeatable. "
            "[default: everything published, once]"
        ),
    ] = None,
    placement_grace_s: Annotated[
        float,
        typer.Option("--placement-grace-s", help="How long a vanished node's layers are kept for it, in seconds."),
    ] = 60.0,
    json_events: Annotated[bool, typer.Option("--json", help="Print a JSON line when ready, and no secrets.")] = False,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
) -> None:
    """Serve the API and the tracker that nodes join.

    The API key and the join token come from MESHNET_API_KEY and MESHNET_JOIN_TOKEN, else from
    STORE/credentials.json, which is made at the first start.
    """
    if tracker_only and gateway_only:
        raise UsageError("--tracker-only and --gateway-only exclude each other; leave both out to serve both")
    if gateway_only and not tracker:
        raise UsageError("--gateway-only needs --tracker URL")
    if tracker and not gateway_only:
        raise UsageError("--tracker goes with --gateway-only; without it, serve runs its own tracker")
    if gateway_only and (state_dir or database):
        raise UsageError("--state-dir and --database are the tracker's; a gateway alone keeps nothing")
    if gateway_only and deploy:
        raise UsageError("--deploy is the tracker's; a gateway alone places nothing")
    api_key = None if tracker_only else credentials.api_key(create=True)
    # A gateway alone must know its tracker's token: one made up here would never fit.
    join_token = credentials.join_token(create=not gateway_only)
    asyncio.run(
        _serve(
            host,
            port,
            api_key=api_key,
            join_token=join_token,
            remote_tracker=tracker,
            state_dir=state_dir,
            database=database,
            heartbeat_s=heartbeat_s,
            lease_ttl_s=lease_ttl_s,
            session_lease_s=session_lease_s,
            step_timeout_s=step_timeout_s,
            repair_timeout_s=repair_timeout_s,
            deploy=deploy or [],
            placement_grace_s=placement_grace_s,
            json_events=json_events,
            with_parent=exit_with_parent,
        )
    )


async def _serve(
    host: str,
    port: int,
    *,
    api_key: Secret | None,
    join_token: Secret,
    remote_tracker: str | None,
    state_dir: Path | None,
    database: str | None,
    heartbeat_s: float,
    lease_ttl_s: float,
    session_lease_s: float,
    step_timeout_s: float,
    repair_timeout_s: float,
    deploy: list[str],
    placement_grace_s: float,
    json_events: bool,
    with_parent: bool,
) -> None:
    # Imported here, so that the other commands start fast.
    from meshnet.artifact.store import store_root
    from meshnet.cli import hosting, interpreter
    from meshnet.core import RouteSource
    from meshnet.tracker.app import create_app as create_tracker_app
    from meshnet.tracker.client import HttpRouteSource
    from meshnet.tracker.database_url import sqlite_directory, sqlite_url
    from meshnet.tracker.exclusive import only_process
    from meshnet.tracker.recipes import Recipe
    from meshnet.tracker.settings import TrackerSettings
    from meshnet.tracker.tracker import Tracker

    recipes = [Recipe.parse(text) for text in deploy]
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(hosting.listen(host, port))
        await stack.enter_async_context(interpreter.few_pauses())
        source: RouteSource
        tracker_app: hosting.Application | None = None
        application: hosting.Application
        if remote_tracker is not None:
            source = await stack.enter_async_context(HttpRouteSource(remote_tracker, join_token.value))
        else:
            url = database or sqlite_url((state_dir or store_root() / "tracker") / "tracker.sqlite3")
            directory = sqlite_directory(url)
            # A database on a server has a lock of its own.
            if directory is not None:
                stack.enter_context(
                    only_process(
                        directory / "tracker.lock",
                        otherwise=f"another tracker is running on {directory}; stop it, or pass --state-dir",
                    )
                )
            settings = TrackerSettings(
                heartbeat_s=heartbeat_s,
                lease_ttl_s=lease_ttl_s,
                session_lease_s=session_lease_s,
                placement_grace_s=placement_grace_s,
            )
            tracker = await stack.enter_async_context(Tracker.open(url, settings, recipes))
            source = tracker.sessions
            tracker_app = create_tracker_app(tracker, join_token.value)
        if api_key is not None:
            from meshnet.gateway.app import create_app as create_gateway_app
            from meshnet.gateway.settings import GatewaySettings

            gateway_settings = GatewaySettings(
                api_keys=(api_key.value,), step_timeout_s=step_timeout_s, repair_timeout_s=repair_timeout_s
            )
            application = create_gateway_app(source, gateway_settings)
            if tracker_app is not None:
                application = hosting.side_by_side(tracker_app, application)
        elif tracker_app is not None:
            application = tracker_app
        else:
            raise UsageError("nothing to serve: neither tracker nor gateway")

        def announce() -> None:
            interpreter.settle()
            url = hosting.reachable_url(listener)
            if json_events:
                print(json.dumps({"event": "ready", "url": url}), flush=True)
            else:
                print(_welcome(url, api_key, join_token if tracker_app is not None else None), flush=True)
            if not _is_private_to_machine(listener):
                log.warning("keys and prompts travel unencrypted to %s: let only a private network reach it", url)

        await hosting.run(application, listener, on_ready=announce, with_parent=with_parent)
    log.info("stopped")


def _welcome(url: str, api_key: Secret | None, join_token: Secret | None) -> str:
    lines = []
    if api_key is not None:
        lines += [f"API         {url}/v1", f"API key     {_shown(api_key)}"]
    if join_token is not None:
        lines += [
            f"Tracker     {url}",
            f"Join token  {_shown(join_token)}",
            f"Share       meshnet artifact seed FILE.gguf --tracker {url} --join-token TOKEN",
            f"Add a node  meshnet node --artifact NAME --layers START:END --tracker {url} --join-token TOKEN",
        ]
    return "\n".join(lines)


def _shown(secret: Secret) -> str:
    # What the operator has set is known already; what was made here must be shown somewhere.
    if secret.origin in (credentials.API_KEY_ENVIRONMENT, credentials.JOIN_TOKEN_ENVIRONMENT):
        return f"(from {secret.origin})"
    return f"{secret.value}  (kept in {secret.origin})"


def _is_private_to_machine(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
