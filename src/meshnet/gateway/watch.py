"""Runs work for a client, and stops it as soon as the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.types import Receive

from meshnet.errors import MeshnetError

_Result = TypeVar("_Result")


class ClientGone(MeshnetError):
    """The client closed its connection, or takes nothing off it; there is nobody to answer."""


async def run_watched(work: Coroutine[Any, Any, _Result], watcher: Coroutine[Any, Any, NoReturn]) -> _Result:
    """The result of ``work``. If ``watcher`` raises first, ``work`` is cancelled and has ended when that is raised."""
    task = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(watcher)
    try:
        await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else watching.result()
    finally:
        task.cancel()
        watching.cancel()
        await asyncio.gather(task, watching, return_exceptions=True)


async def client_leaves(receive: Receive) -> NoReturn:
    """Waits until the client of a request whose body has been read disconnects.

    Raises:
        ClientGone: it has.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone("the client closed its connection")
