"""Bodies of requests to the tracker: bounded in size and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect

from meshnet.errors import RequestError

#: Most bytes of a request body: 64 shards with large boundary schemas stay far below.
MAX_BODY_BYTES = 2 << 20

#: A body that takes longer is refused, so that nobody holds connections for nothing.
BODY_TIMEOUT_S = 30.0


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    max_bytes: int = MAX_BODY_BYTES,
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """The whole body of an HTTP request.

    Raises:
        RequestError: it is too large, or not complete in time.
        ClientDisconnect: the client went away.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise RequestError(f"the body is larger than {max_bytes} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise RequestError(f"the body was not complete after {timeout_s:g} s") from error
