"""A real HTTP server for an ASGI application, on a free loopback port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from meshnet.cli.hosting import Application, listen


@asynccontextmanager
async def running(application: Application) -> AsyncIterator[str]:
    """Serve ``application`` while the block runs; gives its URL."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(application, log_config=None, timeout_graceful_shutdown=5))
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            async with asyncio.timeout(10):
                while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
