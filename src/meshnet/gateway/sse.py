"""Server-sent events: an answer streamed as it is generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NoReturn

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from meshnet.gateway.failures import Failure
from meshnet.gateway.watch import ClientGone, client_leaves, run_watched


class EventStream(Response):
    """Sends each item of ``events`` (JSON) as one event, then ``[DONE]``.

    The status line waits for the first event, or for ``keepalive_s`` of silence. An error before that is an ordinary
    error response; after it, an event with ``error``, and the stream ends without ``[DONE]``, so that a client can
    always tell a broken answer from a complete one. ``events`` is closed as soon as the client goes away, or takes
    nothing for ``stall_timeout_s``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keepalive_s: float,
        stall_timeout_s: float,
        on_error: Callable[[Exception], Failure],
    ) -> None:
        # Proxies must pass each event on at once.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keepalive_s = keepalive_s
        self._stall_timeout_s = stall_timeout_s
        self._on_error = on_error
        self._started = False
        self._last_write_s = time.monotonic()
        self._writing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_watched(self._answer(scope, receive, send), client_leaves(receive))
        except ClientGone:
            if not self._started:
                raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_watched(self._pump(send), self._keep_alive(send))
        except ClientGone:
            raise
        except Exception as error:
            failure = self._on_error(error)
            if not self._started:
                await failure.response()(scope, receive, send)
                return
            await self._write(send, _event(failure.event()))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await self._write(send, _event(event))
        await self._write(send, _event(b"[DONE]"))

    async def _keep_alive(self, send: Send) -> NoReturn:
        while True:
            silent_s = time.monotonic() - self._last_write_s
            if silent_s >= self._keepalive_s:
                await self._write(send, b": keep-alive\n\n")
            else:
                await asyncio.sleep(self._keepalive_s - silent_s)

    async def _write(self, send: Send, body: bytes) -> None:
        async with self._writing:
            if not self._started:
                self._started = True
                await self._send(
                    send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
            await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
            self._last_write_s = time.monotonic()

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await send(message)
        except TimeoutError as error:
            raise ClientGone(f"the client took nothing for {self._stall_timeout_s:g} s") from error
        except OSError as error:
            raise ClientGone("the client closed its connection") from error


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
