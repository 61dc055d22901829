"""A gateway on a real socket, served by uvicorn in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI

from meshnet.core import RouteSource
from meshnet.gateway.app import create_app
from meshnet.gateway.settings import GatewaySettings
from tests.support.http import running

API_KEY = "test-key-5d2f"

#: Time limits short enough for tests, with room for a busy machine.
TEST_SETTINGS = GatewaySettings(
    api_keys=(API_KEY,),
    call_timeout_s=5.0,
    close_timeout_s=2.0,
    step_timeout_s=20.0,
    repair_timeout_s=0.3,
    repair_poll_s=0.02,
)


@asynccontextmanager
async def serve_gateway(
    routes: RouteSource, settings: GatewaySettings = TEST_SETTINGS, **changes: object
) -> AsyncIterator[tuple[str, FastAPI]]:
    """Yields the gateway's base URL (without ``/v1``) and its application."""
    app = create_app(routes, replace(settings, **changes))  # type: ignore[arg-type]
    async with running(app) as url:
        yield url, app


async def until(condition: Callable[[], bool], what: str, *, timeout_s: float = 10.0) -> None:
    """Wait until ``condition()`` holds.

    Raises:
        AssertionError: it did not in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.005)
