"""Connections that hold on to a server without asking for anything."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from meshnet.cli import hosting


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await asyncio.sleep(0.6)  # longer than a head may take: an answer under way is not cut off
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_a_connection_without_a_whole_request_head_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting._Protocol, "head_timeout_s", 0.3)
    ready = asyncio.Event()
    with hosting.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.create_task(hosting.run(application, listener, on_ready=ready.set, with_parent=False))
        await ready.wait()

        async def send(*parts: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for part in parts:
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(20):
                answer = await reader.readuntil(b"\r\n\r\n") if parts and parts[-1].endswith(b"\r\n\r\n") else b""
                if answer:
                    # The connection may be used again; half a second request is given up like half a first.
                    writer.write(b"GET / HT")
                rest = await reader.read()
            writer.close()
            await writer.wait_closed()
            return answer + rest

        assert await send() == b""
        assert await send(b"GET / HTTP/1.1\r\nHo") == b""
        assert (await send(b"GET / HTTP/1.1\r\n", b"Host: x\r\n\r\n")).startswith(b"HTTP/1.1 204")
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
