"""Tickets: permission to use one worker for one session. The format is defined at ``Ticket`` in shard.proto."""

from __future__ import annotations

import hashlib
import hmac

from meshnet.core import Ticket


def make_ticket(worker_key: bytes, session_id: str, epoch: int, shard_id: str, expires_unix_s: int) -> Ticket:
    """Sign a ticket with the key that the worker of ``shard_id`` was started with.

    ``session_id`` is 32 lower-case hex digits. An empty key makes an unsigned ticket (empty ``mac``), which only a
    worker started without a key accepts.

    Raises:
        pydantic.ValidationError: the session id, epoch or expiry is malformed.
    """
    mac = ""
    if worker_key:
        text = f"meshnet-ticket-v1\n{session_id}\n{epoch}\n{shard_id}\n{expires_unix_s}"
        mac = hmac.new(worker_key, text.encode(), hashlib.sha256).hexdigest()
    return Ticket(session_id=session_id, epoch=epoch, expires_unix_s=expires_unix_s, mac=mac)
